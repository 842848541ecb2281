"""The names of tasks. Nothing here imports torch."""

from megatron_parallel import Extensions

from megatron_train.errors import TrainError

TASKS = Extensions("megatron.tasks", "kind of task", TrainError)
"""Kinds of tasks by name, those of other distributions too."""
