"""The devices of a node: GPUs, their driver, pinned host memory and small copies."""
