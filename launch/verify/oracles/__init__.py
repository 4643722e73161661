"""Other people's models beside ours: steps of Megatron-Core and of transformers, written down for `launch/verify` to compare."""
