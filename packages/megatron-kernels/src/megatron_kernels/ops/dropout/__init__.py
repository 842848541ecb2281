"""Dropout whose mask is a hash of each element."""
