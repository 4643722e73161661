"""Mixture of experts: routing, token dispatch to ranks and back, expert GEMMs and load balancing."""
