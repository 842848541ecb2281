"""Sizes and costs of a run, computed from its configuration before anything is built."""
