"""A mixture of experts from a dense model."""
