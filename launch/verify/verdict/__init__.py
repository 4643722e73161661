"""Whether a run equals its reference, and the likely cause if not, from the differences between their tensors."""
