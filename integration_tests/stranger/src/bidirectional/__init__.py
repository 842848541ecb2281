"""Bidirectional encoders (BERT) as a kind of model for the megatron packages."""
