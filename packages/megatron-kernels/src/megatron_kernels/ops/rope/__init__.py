"""Rotary position embedding: frequencies, tables and the rotation."""
