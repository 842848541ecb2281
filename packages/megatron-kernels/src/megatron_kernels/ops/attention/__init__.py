"""Attention over the mask contract, and the block pair that ring attention is built from."""
