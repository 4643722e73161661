"""Pure functions of tensors, and the choice among their implementations: no communication and no parameters."""
