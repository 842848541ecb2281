"""Heads that map a whole sequence to a vector: pooling, pooler, and linear layer."""
