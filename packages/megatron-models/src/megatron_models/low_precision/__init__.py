"""Linear layers that multiply in FP8 or FP4."""
