"""Pure functions of tensors, and the choices among them: no communication, no state, nothing that writes a main grad."""
