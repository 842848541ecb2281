"""Settings and checks of the task. Does not import torch."""

from dataclasses import dataclass, field

from megatron_train import RunConfig, TrainError


@dataclass(frozen=True)
class MaskedLMConfig:
    """Settings of masked language modelling."""

    probability: float = field(
        default=0.15, metadata={"flag": "--mask-prob", "help": "share of tokens that are masked"}
    )
    short_samples: float = field(
        default=0.1, metadata={"flag": "--short-seq-prob", "help": "fraction of shorter samples"}
    )

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1:
            raise TrainError(f"--mask-prob must be between 0 and 1, got {self.probability}")


def check_masked_lm(run: RunConfig) -> None:
    """Refuses runs without an output layer, or with samples too short to mask a token.

    Raises:
        TrainError: The settings do not fit; the message names the flags.
    """
    if not run.model.masked_lm_head:
        raise TrainError("the task masked_lm needs an output layer; give --masked-lm-head")
    share = run.section(MaskedLMConfig).probability
    if share * run.data.seq_length < 1:
        raise TrainError(
            f"--mask-prob {share} masks less than one of --seq-length {run.data.seq_length} "
            "tokens; raise one of them"
        )
