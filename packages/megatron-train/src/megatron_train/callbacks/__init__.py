"""What happens around the steps of a run: logging, evaluation, checkpoints, stopping."""
