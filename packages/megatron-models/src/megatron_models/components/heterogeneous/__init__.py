"""Layers that differ one by one, and replaced mixers."""
