"""The head of masked language models."""
