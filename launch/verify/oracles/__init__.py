"""Other libraries' models: training steps in Megatron-Core and transformers, for `launch/verify` to compare."""
