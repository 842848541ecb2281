"""The dense feed-forward layer."""
