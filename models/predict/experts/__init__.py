"""Bytes of layers with experts: on the wire, and in memory."""
