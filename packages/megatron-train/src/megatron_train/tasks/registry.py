"""The registry of tasks. Importing this module does not import torch."""

from megatron_parallel.extensions import Extensions

from megatron_train.errors import TrainError

TASKS = Extensions("megatron.tasks", "kind of task", TrainError)
"""Kinds of tasks by name, including those of other distributions."""
