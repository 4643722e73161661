"""Files: atomic writes, bounded reads, and secrets kept out of them."""
