"""The sections of a run's configuration that belong to the trainer itself.

The sections ``model``, ``optimizer`` and ``layout`` are `megatron_models.GPTConfig`,
`megatron_optim.OptimizerConfig` and `megatron_parallel.ParallelLayout`. Names and defaults are
Megatron-LM's unless the help says otherwise. A section checks what it can see alone;
`megatron_train.config.run` checks what involves several.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_train.errors import TrainError


def _setting(default: Any, help: str, **metadata: Any) -> Any:  # noqa: A002
    return field(default=default, metadata={"help": help, **metadata})


def _required(help: str, **metadata: Any) -> Any:  # noqa: A002
    return field(metadata={"help": help, **metadata})


def _positive(section: object, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        if value is not None and not value > 0:
            raise TrainError(f"--{name.replace('_', '-')} must be positive, got {value}")


def _not_negative(section: object, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        if value is not None and not value >= 0:
            raise TrainError(f"--{name.replace('_', '-')} must not be negative, got {value}")


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens come from."""

    seq_length: int = _required("length of a training sample", unit="tokens")
    data_path: tuple[str, ...] | None = _setting(
        None,
        "path of a tokenised corpus without .bin/.idx, divided by --split; several corpora are "
        "given as weight path pairs",
        unit="path",
    )
    train_data_path: tuple[str, ...] | None = _setting(
        None, "tokenised corpus to train on, in the forms of --data-path", unit="path"
    )
    valid_data_path: tuple[str, ...] | None = _setting(
        None, "tokenised corpus to validate on, in the forms of --data-path", unit="path"
    )
    split: str = _setting(
        "969,30,1", "shares of train, validation and test that --data-path is divided into"
    )
    tokenizer_model: str | None = _setting(
        None,
        "tokenizer file or folder; gives the vocabulary size and is kept in the checkpoint",
        unit="path",
    )

    reset_position_ids: bool = _setting(False, "restart positions after each document")
    reset_attention_mask: bool = _setting(False, "attend within a document only")
    eod_mask_loss: bool = _setting(False, "no loss where the input is the end-of-document token")
    data_cache_path: str | None = _setting(
        None, "folder that keeps built sample indices for the next start", unit="path"
    )

    def __post_init__(self) -> None:
        _positive(self, "seq_length")
        if self.data_path and (self.train_data_path or self.valid_data_path):
            raise TrainError(
                "--data-path and --train-data-path/--valid-data-path exclude each other; give one"
            )
        if not self.data_path and not self.train_data_path:
            raise TrainError("no corpus: give --data-path, or --train-data-path")
        for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if getattr(self, name) and self.tokenizer_model is None:
                flag = "--" + name.replace("_", "-")
                raise TrainError(f"{flag} needs --tokenizer-model, which knows where documents end")


@dataclass(frozen=True)
class TrainingConfig:
    """Length of the run, batch, precision and device."""

    train_iters: int = _required("steps of the whole run", unit="steps")
    micro_batch_size: int = _required("samples in one forward pass", unit="samples")
    global_batch_size: int | None = _setting(
        None,
        "samples in one step (default: one micro-batch per data parallel rank)",
        unit="samples",
    )
    seed: int = _setting(1234, "seed of initial weights and data order")
    bf16: bool = _setting(False, "hold weights and compute in bfloat16, with fp32 main weights")
    float64: bool = _setting(
        False, "hold weights and compute in float64, for proofs of equality (our name)"
    )
    compile: bool = _setting(
        False, "compile forward, loss and backward with torch.compile (our name)"
    )
    deterministic_mode: bool = _setting(
        False, "use deterministic algorithms only; an operation that has none is an error"
    )
    device: Literal["auto", "cpu", "cuda"] = _setting(
        "auto", "device to train on; auto takes a GPU if there is one (our name)"
    )
    sequence_parallel: bool = _setting(
        False, "cut activations between tensor parallel regions along the sequence"
    )
    hidden_dropout: float = _setting(
        0.1, "probability of dropping an element after embedding, attention and feed-forward layer"
    )
    attention_dropout: float = _setting(0.1, "probability of dropping an attention probability")
    distributed_timeout_minutes: float = _setting(
        10.0,
        "time after which ranks give up waiting for a rank that does not answer",
        unit="minutes",
    )
    exit_interval: int | None = _setting(
        None, "stop, with a checkpoint, at the next multiple of this step", unit="steps"
    )
    exit_duration_in_mins: float | None = _setting(
        None, "stop, with a checkpoint, after this time", unit="minutes"
    )

    def __post_init__(self) -> None:
        _positive(self, "micro_batch_size", "global_batch_size", "train_iters")
        _positive(self, "exit_interval", "exit_duration_in_mins", "distributed_timeout_minutes")
        _not_negative(self, "seed")
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                flag = "--" + name.replace("_", "-")
                raise TrainError(f"{flag} must be in [0, 1), got {getattr(self, name)}")
        if self.bf16 and self.float64:
            raise TrainError("--bf16 and --float64 exclude each other; give one")


@dataclass(frozen=True)
class ScheduleConfig:
    """Lengths of the learning-rate schedule; its shape is in the section ``optimizer``."""

    lr_decay_iters: int | None = _setting(
        None, "step at which the decay ends (default: --train-iters)", unit="steps"
    )
    lr_warmup_iters: int = _setting(0, "steps of linear warm-up", unit="steps")
    lr_warmup_fraction: float | None = _setting(
        None, "warm-up as a share of the decay, instead of --lr-warmup-iters"
    )
    lr_wsd_decay_iters: int | None = _setting(
        None, "steps of the last phase of the WSD style", unit="steps"
    )

    def __post_init__(self) -> None:
        _positive(self, "lr_decay_iters", "lr_wsd_decay_iters")
        _not_negative(self, "lr_warmup_iters", "lr_warmup_fraction")
        if self.lr_warmup_fraction is not None and self.lr_warmup_iters:
            raise TrainError(
                "--lr-warmup-fraction and --lr-warmup-iters exclude each other; give one"
            )
        if self.lr_warmup_fraction is not None and self.lr_warmup_fraction >= 1:
            raise TrainError(f"--lr-warmup-fraction must be below 1, got {self.lr_warmup_fraction}")


@dataclass(frozen=True)
class EvaluationConfig:
    """When and how much to validate; every evaluation uses the same samples."""

    eval_interval: int = _setting(1000, "steps between evaluations", unit="steps")
    eval_iters: int = _setting(
        100, "global batches in one evaluation; 0 switches evaluation off", unit="batches"
    )

    def __post_init__(self) -> None:
        _positive(self, "eval_interval")
        _not_negative(self, "eval_iters")


@dataclass(frozen=True)
class CheckpointConfig:
    """Where checkpoints are written and read."""

    save: str | None = _setting(
        None, "folder for checkpoints, metrics and the loss plot of this run", unit="path"
    )
    load: str | None = _setting(
        None, "folder to continue from; takes its newest complete checkpoint", unit="path"
    )
    save_interval: int | None = _setting(
        None, "steps between checkpoints; one is written at the end in any case", unit="steps"
    )
    keep_last: int | None = _setting(
        None, "complete checkpoints to keep (our name; default: all)", unit="checkpoints"
    )
    exit_on_missing_checkpoint: bool = _setting(
        False, "refuse to start fresh where --load has no complete checkpoint"
    )

    def __post_init__(self) -> None:
        _positive(self, "save_interval", "keep_last")
        if self.save is None:
            for name in ("save_interval", "keep_last"):
                if getattr(self, name) is not None:
                    flag = "--" + name.replace("_", "-")
                    raise TrainError(f"{flag} needs --save, the folder to write checkpoints to")
        if self.exit_on_missing_checkpoint and self.load is None:
            raise TrainError("--exit-on-missing-checkpoint needs --load")


@dataclass(frozen=True)
class LoggingConfig:
    """What is printed and recorded."""

    log_interval: int = _setting(100, "steps between log lines", unit="steps")
    log_throughput: bool = _setting(False, "add throughput per GPU (TFLOP/s/GPU) to the log line")
    tensorboard_dir: str | None = _setting(None, "folder for TensorBoard event files", unit="path")
    progress: bool = _setting(
        True, "show a progress bar where standard error is a terminal (our name)"
    )

    def __post_init__(self) -> None:
        _positive(self, "log_interval")
