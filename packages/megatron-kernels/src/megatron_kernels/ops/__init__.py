"""The operations, one folder per family."""
