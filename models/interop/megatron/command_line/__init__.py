"""Convert a pretrain_gpt.py command line to a config."""
