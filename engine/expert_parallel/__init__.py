"""Mixtures of experts: routing, dispatch of tokens to ranks and back, the experts' GEMMs, and load balance."""
