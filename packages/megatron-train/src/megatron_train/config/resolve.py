"""From a command line to a checked configuration: collect, derive, build."""

import argparse
import os
from pathlib import Path

from megatron_train.config.files import read_file
from megatron_train.config.flags import given_flags
from megatron_train.config.run import RunConfig, build_run, run_options
from megatron_train.config.values import Values


def resolve(
    namespace: argparse.Namespace, world_size: int | None = None
) -> tuple[RunConfig, Values]:
    """Return the configuration of a run and the values it was made from.

    Args:
        namespace: the parsed command line.
        world_size: ranks of the run; by default as torchrun says, and 1 without it.

    Raises:
        TrainError: a value that cannot be used; each section's own exception for what it refuses.
        UsageError: a required value that nobody gave.
    """
    options = run_options()
    values = Values()
    if namespace.config is not None:
        values = read_file(Path(namespace.config), options)
    values = derive(values.updated(given_flags(namespace, options)))
    return build_run(values, world_size or started_ranks()), values


def started_ranks() -> int:
    """Return the number of ranks that torchrun, or whoever sets its variables, has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def derive(values: Values) -> Values:
    """Fill in the number of positions from the sequence, the vocabulary from the tokenizer."""
    seq_length = values.get("data.seq_length")
    if seq_length is not None:
        values = values.with_derived("model.max_position_embeddings", seq_length, "--seq-length")
    tokenizer = values.get("data.tokenizer_model")
    if tokenizer is not None and values.get("model.vocab_size") is None:
        from megatron_data import load_tokenizer

        size = load_tokenizer(Path(tokenizer)).vocab_size
        values = values.with_derived("model.vocab_size", size, "--tokenizer-model")
    return values
