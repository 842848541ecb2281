"""Runs of the commands in the layouts of Megatron-LM's functional tests, and their losses."""
