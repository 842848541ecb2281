"""Normalisation over the last dimension: LayerNorm and RMSNorm."""
