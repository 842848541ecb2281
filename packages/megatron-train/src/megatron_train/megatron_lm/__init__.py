"""Megatron-LM's command lines: the status of each flag here, and conversion of launch scripts."""
