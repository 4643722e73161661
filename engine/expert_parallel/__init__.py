"""Mixtures of experts: the choice of experts, the ways of tokens to their ranks and back, experts' GEMMs, and balance."""
