"""One rank's messages, memory and operators in any layout, counted in the engine's own code on tensors that hold no memory."""
