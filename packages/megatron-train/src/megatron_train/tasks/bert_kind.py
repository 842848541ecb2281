"""The entry of BERT's pretraining in the entry-point group ``megatron.tasks``."""

from functools import partial

from megatron_parallel.extensions import Section

from megatron_train.config.run import RunConfig
from megatron_train.errors import TrainError
from megatron_train.tasks.kinds import TaskKind
from megatron_train.tasks.masking import MaskingSettings
from megatron_train.tasks.sentences import SETTINGS_READ, check_sentences, with_sentence_defaults

SHORTEST = 5
"""Tokens of the shortest sample: three special tokens and one of each segment."""


def check_bert(run: RunConfig) -> None:
    """Refuses models without logits of tokens, and samples without room for text.

    Raises:
        TrainError: The settings do not fit; the message names the flags.
    """
    if not run.model.predicts_tokens:
        raise TrainError(
            "the task bert needs the head of masked language modelling; leave out "
            "--no-masked-lm-head and --task-head"
        )
    if run.data.seq_length < SHORTEST:
        raise TrainError(
            f"--seq-length {run.data.seq_length} has no room for text beside the special tokens; "
            f"use at least {SHORTEST}"
        )


TASK = TaskKind(
    name="bert",
    summary="predict masked tokens and the order of two segments",
    task="megatron_train.tasks.bert:bert_task",
    data="megatron_train.tasks.bert_data:BertData",
    proof_data="megatron_train.prove.samples:BidirectionalProof",
    model_kinds=("bert",),
    sections=(Section("masking", MaskingSettings, "masked words"),),
    supported_settings=SETTINGS_READ,
    checks=(check_sentences, check_bert),
    derive=partial(with_sentence_defaults, task="bert"),
)
