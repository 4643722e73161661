"""Models: a GPT cut into pipeline chunks and tensor-parallel shards, built on the engine's parallel layers."""
