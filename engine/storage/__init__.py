"""Writes files atomically, reads them within limits, and keeps secrets out of them."""
