"""Mamba-2: a state-space layer."""
