"""What one rank of any layout sends, keeps and computes, from the engine's own code on tensors without memory."""
