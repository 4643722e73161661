"""Pure functions of tensors and the choice among their implementations: no communication, no state, no main grads."""
