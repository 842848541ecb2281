"""Reads Bash scripts without running them."""
