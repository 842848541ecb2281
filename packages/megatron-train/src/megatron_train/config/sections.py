"""The sections of a run's configuration that belong to the trainer itself.

The sections ``model``, ``optimizer`` and ``layout`` are the configuration of the model's kind,
`megatron_optim.OptimizerConfig` and `megatron_parallel.ParallelLayout`. Names and defaults are
Megatron-LM's unless the help says otherwise. A section checks what it can see alone;
`megatron_train.config.run` checks what involves several.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_train.config.fields import (
    check_not_negative,
    check_positive,
    flag_of,
    required,
    setting,
)
from megatron_train.errors import TrainError


@dataclass(frozen=True)
class TrainingConfig:
    """Length of the run, batch, precision and device."""

    micro_batch_size: int = required("samples in one forward pass", unit="samples")
    task: str | None = setting(
        None,
        "what the model is trained to do, see megatron-train tasks list; unset: what its kind is "
        "for (our name)",
    )
    train_iters: int | None = setting(
        None, "steps of the whole run; this or --train-samples is required", unit="steps"
    )
    train_samples: int | None = setting(
        None,
        "samples of the whole run, instead of --train-iters; an unfinished last batch is left out",
        unit="samples",
    )
    global_batch_size: int | None = setting(
        None,
        "samples in one step; unset: one micro-batch for each data-parallel rank",
        unit="samples",
    )
    rampup_batch_size: tuple[int, ...] | None = setting(
        None,
        "first batch size, its increment, and the samples over which it grows to "
        "--global-batch-size; with --train-samples",
        unit="samples",
    )
    step_batch_size_schedule: tuple[str, ...] | None = setting(
        None,
        "batch sizes by consumed tokens, instead of --global-batch-size, such as "
        '"0:768 250B:1536": 768 samples a step, and 1536 from 250 billion tokens on; K, M, B and T '
        "multiply by powers of 1,000",
    )
    decrease_batch_size_if_needed: bool = setting(
        False,
        "round a batch size down to whole micro-batches of every data parallel rank, instead of "
        "refusing it; not with --step-batch-size-schedule",
    )
    seed: int = setting(1234, "seed of initial weights and data order")
    bf16: bool = setting(False, "hold weights and compute in bfloat16, with fp32 main weights")
    float64: bool = setting(
        False, "hold weights and compute in float64, for proofs of equality (our name)"
    )
    calculate_per_token_loss: bool = setting(
        True,
        "give every true token of a step the same weight; otherwise every micro-batch of every "
        "data parallel rank has the same, as is Megatron-LM's default",
        flag="--calculate-per-token-loss",
    )
    compile: bool = setting(
        False, "compile forward, loss and backward with torch.compile (our name)"
    )
    deterministic_mode: bool = setting(
        False, "use deterministic algorithms only; an operation that has none is an error"
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "device to train on; auto takes a GPU if there is one (our name)"
    )
    max_seqlen_per_dp_cp_rank: int | None = setting(
        None,
        "tokens that one rank may hold at a time, with --hybrid-context-parallel; longer documents "
        "are cut over several ranks",
        unit="tokens",
    )
    hidden_dropout: float = setting(
        0.1, "probability of dropping an element after embedding, attention and feed-forward layer"
    )
    attention_dropout: float = setting(0.1, "probability of dropping an attention probability")
    distributed_timeout_minutes: float = setting(
        10.0,
        "time after which ranks give up waiting for a rank that does not answer",
        unit="minutes",
    )
    exit_interval: int | None = setting(
        None, "stop, with a checkpoint, at the next multiple of this step", unit="steps"
    )
    exit_duration_in_mins: float | None = setting(
        None, "stop, with a checkpoint, after this time", unit="minutes"
    )

    def __post_init__(self) -> None:
        check_positive(
            self, "micro_batch_size", "global_batch_size", "train_iters", "train_samples"
        )
        if self.train_iters is None and self.train_samples is None:
            raise TrainError(
                "the length of the run is unknown: give --train-iters, or --train-samples"
            )
        if self.train_iters is not None and self.train_samples is not None:
            raise TrainError("--train-iters and --train-samples exclude each other; give one")
        if self.rampup_batch_size is not None:
            if self.global_batch_size is None:
                raise TrainError("--rampup-batch-size needs --global-batch-size, where it ends")
            if self.train_samples is None:
                raise TrainError(
                    "--rampup-batch-size makes steps of several sizes, so the length of the run "
                    "is counted in samples: give --train-samples instead of --train-iters"
                )
        if self.step_batch_size_schedule is not None:
            for name in ("rampup_batch_size", "decrease_batch_size_if_needed"):
                if getattr(self, name):
                    raise TrainError(
                        f"--step-batch-size-schedule and {flag_of(name)} exclude each other; give "
                        "one"
                    )
        check_positive(self, "max_seqlen_per_dp_cp_rank")
        check_positive(
            self, "exit_interval", "exit_duration_in_mins", "distributed_timeout_minutes"
        )
        check_not_negative(self, "seed")
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                flag = "--" + name.replace("_", "-")
                raise TrainError(f"{flag} must be in [0, 1), got {getattr(self, name)}")
        if self.bf16 and self.float64:
            raise TrainError("--bf16 and --float64 exclude each other; give one")


@dataclass(frozen=True)
class ScheduleConfig:
    """Lengths of the learning-rate schedule; its shape is in the section ``optimizer``.

    Where the run is as long as --train-samples says, lengths are samples as well.
    """

    lr_decay_iters: int | None = setting(
        None, "step at which the decay ends; unset: --train-iters", unit="steps"
    )
    lr_decay_samples: int | None = setting(
        None,
        "samples at which the decay ends; unset: --train-samples",
        unit="samples",
    )
    lr_warmup_iters: int = setting(0, "steps of linear warm-up", unit="steps")
    lr_warmup_samples: int = setting(0, "samples of linear warm-up", unit="samples")
    lr_warmup_fraction: float | None = setting(
        None, "warm-up as a share of the decay, instead of --lr-warmup-iters or -samples"
    )
    lr_wsd_decay_iters: int | None = setting(
        None, "steps of the last phase of the WSD style", unit="steps"
    )
    lr_wsd_decay_samples: int | None = setting(
        None, "samples of the last phase of the WSD style", unit="samples"
    )

    def __post_init__(self) -> None:
        check_positive(self, "lr_decay_iters", "lr_wsd_decay_iters")
        check_positive(self, "lr_decay_samples", "lr_wsd_decay_samples")
        check_not_negative(self, "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction")
        for name in ("lr_warmup_iters", "lr_warmup_samples"):
            if self.lr_warmup_fraction is not None and getattr(self, name):
                raise TrainError(
                    f"--lr-warmup-fraction and {flag_of(name)} exclude each other; give one"
                )
        if self.lr_warmup_fraction is not None and self.lr_warmup_fraction >= 1:
            raise TrainError(f"--lr-warmup-fraction must be below 1, got {self.lr_warmup_fraction}")

    def refuse_other_unit(self, unit: str, other: str) -> None:
        """Refuses lengths in the unit that the run is not measured in.

        Args:
            unit: ``iters`` or ``samples``, what --train-... is given in.
            other: the other of the two.
        """
        for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
            if getattr(self, f"{name}_{other}"):
                wrong, right = flag_of(f"{name}_{other}"), flag_of(f"{name}_{unit}")
                raise TrainError(f"--train-{unit} and {wrong} do not go together; give {right}")

    def check_lengths(self, unit: str, run: int, style: str) -> None:
        """Refuses phases that do not fit into the decay, in the unit they were given in.

        Args:
            unit: ``iters`` or ``samples``.
            run: length of the run.
            style: of the decay.
        """
        decay, end = getattr(self, f"lr_decay_{unit}"), f"--lr-decay-{unit}"
        if decay is None:
            decay, end = run, f"--train-{unit}"
        warmup, beginning = getattr(self, f"lr_warmup_{unit}"), f"--lr-warmup-{unit}"
        if warmup >= decay:
            raise TrainError(
                f"{beginning} {warmup} must be below {end} {decay}, where the decay of the "
                "learning rate ends; shorten the warm-up or lengthen the decay"
            )
        if self.lr_warmup_fraction is not None:
            warmup, beginning = self.lr_warmup_fraction * decay, "--lr-warmup-fraction"
        annealing, flag = getattr(self, f"lr_wsd_decay_{unit}"), f"--lr-wsd-decay-{unit}"
        if style == "WSD" and annealing is None:
            raise TrainError(
                f"--lr-decay-style WSD needs {flag}, the length of its last phase in "
                f"{'steps' if unit == 'iters' else unit}"
            )
        if style == "WSD" and annealing > decay - warmup:
            raise TrainError(
                f"{flag} {annealing} does not fit between the end of the warm-up at {warmup:g} "
                f"({beginning}) and that of the decay at {decay} ({end}); shorten one of them"
            )


@dataclass(frozen=True)
class EvaluationConfig:
    """When and how much to validate; every evaluation uses the same samples."""

    eval_interval: int = setting(1000, "steps between evaluations", unit="steps")
    eval_iters: int = setting(
        100, "global batches in one evaluation; 0 switches evaluation off", unit="batches"
    )

    def __post_init__(self) -> None:
        check_positive(self, "eval_interval")
        check_not_negative(self, "eval_iters")


@dataclass(frozen=True)
class LoggingConfig:
    """What is printed and recorded."""

    log_interval: int = setting(100, "steps between log lines", unit="steps")
    log_throughput: bool = setting(False, "add throughput per GPU (TFLOP/s/GPU) to the log line")
    tensorboard_dir: str | None = setting(None, "folder for TensorBoard event files", unit="path")
    progress: bool = setting(
        True, "show a progress bar where standard error is a terminal (our name)"
    )

    def __post_init__(self) -> None:
        check_positive(self, "log_interval")
