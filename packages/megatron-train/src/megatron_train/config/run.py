"""The configuration of a whole run, and the checks that involve several of its sections."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron_models import GPTConfig
from megatron_optim import LearningRateSchedule, OptimizerConfig, WeightDecaySchedule
from megatron_parallel import ParallelLayout

from megatron_train.config.options import Option, options_of
from megatron_train.config.sections import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ScheduleConfig,
    TrainingConfig,
)
from megatron_train.config.values import Values
from megatron_train.errors import TrainError, UsageError

SECTIONS: dict[str, tuple[str, type[Any]]] = {
    "model": ("model", GPTConfig),
    "data": ("data", DataConfig),
    "training": ("training", TrainingConfig),
    "optimizer": ("optimizer", OptimizerConfig),
    "schedule": ("learning-rate schedule", ScheduleConfig),
    "layout": ("parallel layout", ParallelLayout),
    "evaluation": ("evaluation", EvaluationConfig),
    "checkpoint": ("checkpoints", CheckpointConfig),
    "logging": ("logging", LoggingConfig),
}
"""Every section of a run: its key in YAML files, a title, and the dataclass that holds it."""


def run_options() -> tuple[Option, ...]:
    """Return every option of a run, section by section."""
    return tuple(option for name, (_, cls) in SECTIONS.items() for option in options_of(cls, name))


@dataclass(frozen=True)
class RunConfig:
    """Everything that defines a run: one field for each section, all checked."""

    model: GPTConfig
    data: DataConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    layout: ParallelLayout = dataclasses.field(default_factory=ParallelLayout)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        _refuse_several_ranks(self.layout)
        if self.data.seq_length > self.model.max_position_embeddings:
            raise TrainError(
                f"--seq-length {self.data.seq_length} exceeds --max-position-embeddings "
                f"{self.model.max_position_embeddings}; shorten the one or raise the other"
            )
        if self.global_batch_size % self.training.micro_batch_size:
            raise TrainError(
                f"--global-batch-size {self.global_batch_size} is not a multiple of "
                f"--micro-batch-size {self.training.micro_batch_size}; change one of them"
            )
        if self.evaluation.eval_iters and not (self.data.data_path or self.data.valid_data_path):
            raise TrainError(
                "nothing to validate on: give --valid-data-path, or --eval-iters 0 to do without"
            )
        self.learning_rate_schedule()
        self.weight_decay_schedule()

    @property
    def global_batch_size(self) -> int:
        """Samples in one step."""
        return self.training.global_batch_size or self.training.micro_batch_size

    @property
    def accumulation(self) -> int:
        """Micro-batches that one rank accumulates in one step."""
        return self.global_batch_size // self.training.micro_batch_size

    def learning_rate_schedule(self) -> LearningRateSchedule:
        """Return the learning rate as a function of consumed samples."""
        decay = self.schedule.lr_decay_iters or self.training.train_iters
        warmup: float = self.schedule.lr_warmup_iters
        if self.schedule.lr_warmup_fraction is not None:
            warmup = self.schedule.lr_warmup_fraction * decay
        annealing = self.schedule.lr_wsd_decay_iters
        batch = self.global_batch_size
        return self.optimizer.learning_rate_schedule(
            decay_samples=decay * batch,
            warmup_samples=int(warmup * batch),
            wsd_decay_samples=None if annealing is None else annealing * batch,
        )

    def weight_decay_schedule(self) -> WeightDecaySchedule:
        """Return the weight decay as a function of consumed samples."""
        samples = self.training.train_iters * self.global_batch_size
        return self.optimizer.weight_decay_schedule(samples=samples)


def build_run(values: Values) -> RunConfig:
    """Build and check the configuration from given values."""
    missing = [option.flag for option in values.missing(run_options())]
    if missing == ["--vocab-size"]:
        raise UsageError("the vocabulary size is unknown: give --tokenizer-model, or --vocab-size")
    if missing:
        raise UsageError(f"missing: {', '.join(missing)}; give as flags or in the file of --config")
    sections = {name: cls(**values.section(name)) for name, (_, cls) in SECTIONS.items()}
    return RunConfig(**sections)


def _refuse_several_ranks(layout: ParallelLayout) -> None:
    options = options_of(ParallelLayout, "layout")
    changed = [
        o.spelling(getattr(layout, o.name))
        for o in options
        if getattr(layout, o.name) not in (1, None)
    ]
    if changed:
        raise TrainError(
            f"pretrain runs on one rank, so {', '.join(changed)} cannot be used; leave out "
            "(`megatron-train layout` draws any layout)"
        )
