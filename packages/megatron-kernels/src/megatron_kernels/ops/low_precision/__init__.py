"""Tensors in few bits with scales, and their products."""
