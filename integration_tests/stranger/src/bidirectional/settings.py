"""Settings of the task, and what it refuses; no torch."""

from dataclasses import dataclass, field

from megatron_train import RunConfig, TrainError


@dataclass(frozen=True)
class MaskedLMConfig:
    """Which tokens are hidden."""

    probability: float = field(
        default=0.15, metadata={"flag": "--mask-prob", "help": "share of tokens that are hidden"}
    )
    short_samples: float = field(
        default=0.1, metadata={"flag": "--short-seq-prob", "help": "share of shorter samples"}
    )

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1:
            raise TrainError(f"--mask-prob must lie between 0 and 1, got {self.probability}")


def check_masked_lm(run: RunConfig) -> None:
    """Refuse runs without an output layer, or in which no sample has a token to hide.

    Raises:
        TrainError: in one line, with the flags.
    """
    if not run.model.masked_lm_head:
        raise TrainError("hidden tokens are predicted by --masked-lm-head; give it")
    share = run.section(MaskedLMConfig).probability
    if share * run.data.seq_length < 1:
        raise TrainError(
            f"--mask-prob {share} hides less than one of --seq-length {run.data.seq_length} "
            "tokens; raise one of them"
        )
