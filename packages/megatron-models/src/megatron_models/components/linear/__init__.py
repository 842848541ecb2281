"""A linear layer that replaces a sublayer."""
