"""Mixture of experts: router, dispatch, experts, and the losses of the router."""
