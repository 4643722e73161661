"""Other libraries' models: steps of Megatron-Core and of transformers, written for `launch/verify` to compare."""
