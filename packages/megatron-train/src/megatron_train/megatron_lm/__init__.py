"""Command lines of Megatron-LM: what became of each flag, and launch scripts made into settings."""
