"""Bytes that expert layers take, on the wire and in memory."""
