"""Callbacks of the trainer: logging, evaluation, recording and stopping."""
