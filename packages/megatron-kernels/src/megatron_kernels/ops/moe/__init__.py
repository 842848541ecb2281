"""Mixture of experts: products with many matrices at once, and the sorting of tokens for them."""
