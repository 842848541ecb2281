"""Models of Mamba-2 layers."""
