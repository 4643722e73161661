"""Hugging Face: config.json, tokenizers and safetensors, in and out."""
