"""The entry of T5's pretraining in the entry-point group ``megatron.tasks``."""

from dataclasses import dataclass
from functools import partial
from typing import Final

from megatron_parallel.extensions import Section

from megatron_train.config.fields import check_positive, setting
from megatron_train.config.run import RunConfig
from megatron_train.errors import TrainError
from megatron_train.tasks.kinds import TaskKind
from megatron_train.tasks.masking import MaskingSettings
from megatron_train.tasks.sentences import SETTINGS_READ, check_sentences, with_sentence_defaults

SHORTEST: Final = 4
"""Tokens of the shortest text of either side: two special tokens and two others."""


@dataclass(frozen=True)
class SpanSettings(MaskingSettings):
    """The section ``spans``: how much of a text is missing, and the length of the decoder's text.

    Defaults are those of Megatron-LM's pretrain_t5.py.

    Raises:
        TrainError: A value is out of range, or two settings exclude each other.
    """

    mask_max_ngram: int = setting(
        10, "largest number of consecutive words that are masked together (our name)", unit="words"
    )
    mask_geometric: bool = setting(
        True,
        "draw the number of words that are masked together from SpanBERT's geometric distribution "
        "(our name)",
    )
    decoder_seq_length: int = setting(
        128,
        "tokens of the decoder's text; --seq-length counts the encoder's",
        unit="tokens",
        small=12,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "decoder_seq_length")
        if self.mask_permutation:
            raise TrainError("--mask-permutation does not work with spans; leave it out")


def check_t5(run: RunConfig) -> None:
    """Refuses texts that are longer than the model's positions, or without room for tokens.

    Raises:
        TrainError: The settings do not fit; the message names the flags.
    """
    lengths = {
        "--seq-length": run.data.seq_length,
        "--decoder-seq-length": run.section(SpanSettings).decoder_seq_length,
    }
    longest = run.model.embedding.max_position_embeddings
    for flag, length in lengths.items():
        if length < SHORTEST:
            raise TrainError(
                f"{flag} {length} has no room for text beside the special tokens; use at least "
                f"{SHORTEST}"
            )
        if length > longest:
            raise TrainError(
                f"{flag} {length} exceeds --max-position-embeddings {longest}; lower the former or "
                "raise the latter"
            )
        parts = run.layout.tp if run.placement.sequence_parallel else 1
        if length % parts:
            raise TrainError(
                f"{flag} {length} is not divisible by --tensor-model-parallel-size {parts}, which "
                f"--sequence-parallel needs; use {length // parts * parts or parts}"
            )


TASK = TaskKind(
    name="t5",
    summary="write the missing spans of a text",
    task="megatron_train.tasks.t5:t5_task",
    data="megatron_train.tasks.t5_data:T5Data",
    proof_data="megatron_train.prove.samples:SpanProof",
    model_kinds=("t5",),
    sections=(Section("spans", SpanSettings, "masked spans"),),
    supported_settings=SETTINGS_READ,
    checks=(check_sentences, check_t5),
    derive=partial(with_sentence_defaults, task="t5"),
)
