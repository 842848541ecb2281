"""Activation functions: GELU, SwiGLU, further ones and their gated forms."""
