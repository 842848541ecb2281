"""Normalization over the last dim: LayerNorm and RMSNorm."""
