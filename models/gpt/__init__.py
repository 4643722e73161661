"""The modules of a GPT, and the chunk of layers that a stage holds."""
