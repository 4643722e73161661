"""A GPT cut into pipeline chunks and tensor-parallel shards, and what belongs to it."""
