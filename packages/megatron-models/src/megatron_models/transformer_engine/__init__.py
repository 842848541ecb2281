"""Products of linear layers, and norms before them, by Transformer Engine."""
