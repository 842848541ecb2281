"""GPT: decoder-only transformers."""
