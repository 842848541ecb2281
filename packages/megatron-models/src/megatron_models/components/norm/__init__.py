"""Normalization of the residual stream."""
