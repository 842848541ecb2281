"""Attention: self-attention and cross-attention, rotary positions, sinks."""
