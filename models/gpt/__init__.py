"""GPT: embedding, attention, MLP, and the chunk of layers that a stage holds."""
