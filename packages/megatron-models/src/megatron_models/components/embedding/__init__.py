"""Embeddings of tokens and positions, and the output layer."""
