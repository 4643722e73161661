"""The verdict and its cause, from measured differences."""
