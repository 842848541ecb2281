"""Normalisation of the residual stream."""
