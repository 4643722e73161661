"""Mixture of experts, with routing, token dispatch, expert GEMMs and load balancing."""
