"""Sparse attention: an indexer selects the keys that each query of latent attention reads."""
