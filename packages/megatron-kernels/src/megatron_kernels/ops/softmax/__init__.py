"""Scaled masked softmax."""
