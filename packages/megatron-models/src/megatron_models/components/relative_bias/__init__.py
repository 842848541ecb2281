"""Learned biases of attention by relative position (T5)."""
