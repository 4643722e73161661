"""Import and export Hugging Face config.json files, tokenizers and safetensors."""
