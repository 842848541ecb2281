"""Activation functions: GELU and SwiGLU."""
