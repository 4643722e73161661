"""A command line of Megatron-LM's pretrain_gpt.py as a configuration."""
