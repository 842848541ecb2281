"""Mixture of experts: grouped matrix products, and the sorting of tokens for them."""
