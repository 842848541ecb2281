"""From the command line of a proof or a dry run to a run.

Importing this module does not import torch.
"""

import argparse
from typing import Final

from megatron_train.config.from_checkpoint import TOKENIZER_SETTINGS
from megatron_train.config.plan import described_values, requested_ranks, with_corpus
from megatron_train.config.resolve import derive
from megatron_train.config.run import RunConfig, build_run
from megatron_train.config.values import Values

_ORIGIN: Final = "the command"
_VOCABULARY: Final = 32000


def resolve_run(namespace: argparse.Namespace) -> RunConfig:
    """Returns the run that a command line describes. Corpus, tokenizer and length may be missing.

    Args:
        namespace: The parsed command line.

    Raises:
        TrainError: A value cannot be used; the message names it as it was given.
        UsageError: The model or the length of samples is missing.
    """
    kind: str = namespace.kind
    values = described_values(namespace)
    if not any(values.get(f"data.{name}") is not None for name in TOKENIZER_SETTINGS):
        values = values.with_derived("data.tokenizer_type", "NullTokenizer", _ORIGIN)
        values = values.with_derived("model.vocab_size", _VOCABULARY, _ORIGIN)
    values = derive(with_corpus(values, _ORIGIN), kind)
    return build_run(_with_lengths(values), requested_ranks(namespace), kind)


def _with_lengths(values: Values) -> Values:
    """Returns values with a batch and a length of the run, if they are not given."""
    values = values.with_derived("training.micro_batch_size", 1, _ORIGIN)
    if values.get("training.train_iters") is None and values.get("training.train_samples") is None:
        values = values.with_derived("training.train_iters", 100, _ORIGIN)
    return values.with_derived("evaluation.eval_iters", 0, _ORIGIN)
