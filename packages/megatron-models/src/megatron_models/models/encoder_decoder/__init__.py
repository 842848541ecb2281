"""Encoder-decoder transformers."""
