"""Hybrid models: recurrent layers, attention and feed-forward layers in a pattern."""
