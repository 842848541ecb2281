"""BERT: encoders that read in both directions."""
