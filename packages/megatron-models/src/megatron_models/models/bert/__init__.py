"""BERT: bidirectional encoders."""
