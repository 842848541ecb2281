"""Checkpoints on disk: written whole or not at all, and checked when they are read."""
