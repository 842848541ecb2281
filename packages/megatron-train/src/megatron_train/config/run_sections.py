"""The sections of a run, and values that are computed from several of them."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from megatron_models import LowPrecisionConfig, ModelConfig, find_kind
from megatron_optim import (
    AveragesConfig,
    LearningRateSchedule,
    LossScaleConfig,
    OffloadConfig,
    OptimizerConfig,
    QKClipConfig,
    SpikeConfig,
    StateFormatConfig,
    WeightDecaySchedule,
)
from megatron_parallel import DataParallelConfig, ParallelLayout, RecomputeConfig
from megatron_parallel.errors import FieldError
from megatron_parallel.pipeline import PipelineConfig

from megatron_train.config.batch_size import BatchSizeSchedule
from megatron_train.config.checkpoint import CheckpointConfig
from megatron_train.config.data import DataConfig
from megatron_train.config.extensions import SelectedExtensions, default_task, extension_sections
from megatron_train.config.options import Option, flags_of, options_of
from megatron_train.config.placement import PlacementConfig
from megatron_train.config.sections import (
    EvaluationConfig,
    LoggingConfig,
    ScheduleConfig,
    TrainingConfig,
)
from megatron_train.errors import TrainError

SectionT = TypeVar("SectionT")

ALL_EXTENSIONS = SelectedExtensions()
"""All installed extensions."""

DEFAULT_KIND = "gpt"
"""The kind of model whose settings are shown by default."""

_SECTIONS: dict[str, tuple[str, type[Any]]] = {
    "data": ("data", DataConfig),
    "training": ("training", TrainingConfig),
    "optimizer": ("optimizer", OptimizerConfig),
    "loss_scale": ("loss scale of fp16", LossScaleConfig),
    "state_formats": ("formats of optimizer state", StateFormatConfig),
    "offload": ("optimizer state in host memory", OffloadConfig),
    "averages": ("averages of weights", AveragesConfig),
    "qk_clip": ("bounds of attention scores", QKClipConfig),
    "spikes": ("steps skipped because of a spike", SpikeConfig),
    "schedule": ("learning-rate schedule", ScheduleConfig),
    "layout": ("parallel layout", ParallelLayout),
    "placement": ("placement on the ranks", PlacementConfig),
    "low_precision": ("products in FP8 and FP4", LowPrecisionConfig),
    "pipeline": ("pipeline", PipelineConfig),
    "data_parallel": ("data parallelism", DataParallelConfig),
    "recompute": ("recomputation and offloading of activations", RecomputeConfig),
    "evaluation": ("evaluation", EvaluationConfig),
    "checkpoint": ("checkpoints", CheckpointConfig),
    "logging": ("logging", LoggingConfig),
}


@cache
def sections(
    kind: str = DEFAULT_KIND, selected: SelectedExtensions = ALL_EXTENSIONS
) -> dict[str, tuple[str, type[Any]]]:
    """Returns title and dataclass of each section of a run, by its key in YAML files.

    Args:
        kind: Kind of the model.
        selected: Extensions whose sections are included. Defaults to all that are installed.

    Raises:
        ConfigError: The kind is not installed.
        TrainError: An extension adds a section with the name of a section of every run.
    """
    found = {"model": ("model", find_kind(kind).config), **_SECTIONS}
    for name, section in extension_sections(kind, selected).items():
        if name in found:
            raise TrainError(
                f"the section {name!r} of {section.config.__module__} has the name of a section of "
                "every run; uninstall that distribution"
            )
        found[name] = (section.title, section.config)
    return found


@cache
def run_options(
    kind: str = DEFAULT_KIND, selected: SelectedExtensions = ALL_EXTENSIONS
) -> tuple[Option, ...]:
    """Returns all options of a run, section by section.

    The result is cached because type hints are slow to evaluate.

    Args:
        kind: Kind of the model.
        selected: Extensions whose options are included. Defaults to all that are installed.

    Raises:
        TrainError: Two options have the same flag.
    """
    found: dict[str, Option] = {}
    for name, (_, cls) in sections(kind, selected).items():
        for option in options_of(cls, name):
            other = found.setdefault(option.flag, option)
            if other is not option:
                raise TrainError(
                    f"the settings {other.key} and {option.key} have the same flag {option.flag}; "
                    "uninstall the distribution that adds one of them"
                )
    return tuple(found.values())


@contextmanager
def named_by_flags(*names: str) -> Iterator[None]:
    """Converts errors of these sections in the `with` block to `TrainError`s that name flags."""
    try:
        yield
    except FieldError as error:
        known = sections()
        flags = {key: flag for name in names for key, flag in flags_of(known[name][1]).items()}
        raise TrainError(error.format_message(flags)) from None


@dataclass(frozen=True)
class RunSections:
    """The sections of a run, unchecked. `RunConfig` checks them.

    Sections that the task, the update rule and the product of linear layers add are in
    ``extension_settings`` by name; `section` finds them by class.
    """

    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    loss_scale: LossScaleConfig = dataclasses.field(default_factory=LossScaleConfig)
    state_formats: StateFormatConfig = dataclasses.field(default_factory=StateFormatConfig)
    offload: OffloadConfig = dataclasses.field(default_factory=OffloadConfig)
    averages: AveragesConfig = dataclasses.field(default_factory=AveragesConfig)
    qk_clip: QKClipConfig = dataclasses.field(default_factory=QKClipConfig)
    spikes: SpikeConfig = dataclasses.field(default_factory=SpikeConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    layout: ParallelLayout = dataclasses.field(default_factory=ParallelLayout)
    placement: PlacementConfig = dataclasses.field(default_factory=PlacementConfig)
    low_precision: LowPrecisionConfig = dataclasses.field(default_factory=LowPrecisionConfig)
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)
    data_parallel: DataParallelConfig = dataclasses.field(default_factory=DataParallelConfig)
    recompute: RecomputeConfig = dataclasses.field(default_factory=RecomputeConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)
    extension_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def task(self) -> str:
        """The name of the task: --task, or the default task of the kind of model."""
        return self.training.task or default_task(self.model.kind)

    @property
    def selected_extensions(self) -> SelectedExtensions:
        """The names of the extensions of the run."""
        return SelectedExtensions(self.task, self.optimizer.optimizer, self.product)

    @property
    def product(self) -> str:
        """The name of the product of linear layers."""
        return self.placement.linear_product

    def section_by_name(self, name: str) -> Any:
        """Returns the section ``name``, which may belong to an extension."""
        return (
            self.extension_settings[name]
            if name in self.extension_settings
            else getattr(self, name)
        )

    def section(self, cls: type[SectionT]) -> SectionT:
        """Returns the section of an extension by its class.

        Args:
            cls: Dataclass of the section.

        Raises:
            TrainError: No extension of the run has such a section.
        """
        for section in self.extension_settings.values():
            if type(section) is cls:
                return section
        raise TrainError(
            f"{self.selected_extensions} add no section {cls.__name__}; choose the extension that "
            "adds it"
        )

    @property
    def layer_split(self) -> tuple[range, ...]:
        """The global layer numbers of each pipeline stage.

        Raises:
            TrainError: Both the model and a flag divide the layers.
        """
        of_model = self.model.stage_split(self.layout)
        if of_model is not None:
            plain, flags = PipelineConfig(), flags_of(PipelineConfig)
            for name in ("stages", "first", "last", "count_embedding", "count_loss"):
                if getattr(self.pipeline, name) != getattr(plain, name):
                    raise TrainError(
                        f"{flags[name]} has no effect, since the model divides its layers over "
                        f"the {len(of_model)} pipeline stages; leave it out"
                    )
            return of_model
        return self.pipeline.stage_layers(
            self.model.depth, self.layout, len(self.model.multi_token())
        )

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks that divide the samples of a step."""
        return self.layout.dp or 1

    @property
    def micro_batch_times_data_parallel_size(self) -> int:
        """The number of samples in one micro-batch of all data-parallel ranks together."""
        return self.training.micro_batch_size * self.data_parallel_size

    @property
    def global_batch_size(self) -> int:
        """The requested number of samples in one step; in the last step if sizes differ."""
        if self.training.step_batch_size_schedule is not None:
            return self.batch_sizes.last
        return self.training.global_batch_size or self.micro_batch_times_data_parallel_size

    @property
    def batch_sizes(self) -> BatchSizeSchedule:
        """The number of samples in each step."""
        training = self.training
        if training.step_batch_size_schedule is not None:
            words = training.step_batch_size_schedule
            return BatchSizeSchedule.stepped(words, self.data.seq_length)
        multiple = (
            self.micro_batch_times_data_parallel_size
            if training.decrease_batch_size_if_needed
            else 1
        )
        if training.rampup_batch_size is not None:
            ramp = training.rampup_batch_size
            return BatchSizeSchedule.ramp(ramp, self.global_batch_size, multiple)
        return BatchSizeSchedule.constant(self.global_batch_size, multiple)

    @property
    def train_iters(self) -> int:
        """The number of steps of the whole run."""
        return self.train_iters_after(0, 0)

    def train_iters_after(self, iteration: int, consumed: int) -> int:
        """Returns the number of steps of the whole run after some steps of other sizes.

        A run that continues with another number of ranks or another batch size divides the
        remaining samples into another number of steps.

        Args:
            iteration: Number of completed steps.
            consumed: Number of samples that they consumed.
        """
        if self.training.train_iters is not None:
            return self.training.train_iters
        return iteration + self.batch_sizes.whole_steps(self.train_samples, consumed)[0]

    @property
    def train_samples(self) -> int:
        """The number of samples of the whole run, for which the data order is computed.

        It does not depend on the layout, because it is computed from the requested batch sizes.
        """
        if self.training.train_samples is not None:
            return self.training.train_samples
        asked = dataclasses.replace(self.batch_sizes, multiple=1)
        return asked.consumed_by(self.training.train_iters or 0)

    @property
    def consumed_samples(self) -> int:
        """The number of samples that the whole run consumes, at most `train_samples`."""
        if self.training.train_iters is not None:
            return self.batch_sizes.consumed_by(self.training.train_iters)
        return self.batch_sizes.whole_steps(self.train_samples)[1]

    def learning_rate_schedule(self, *, decoupled: bool = False) -> LearningRateSchedule:
        """Returns the learning rate as a function of consumed samples.

        Lengths in steps are multiplied by `global_batch_size`, as in Megatron-LM. With
        ``decoupled``, returns the learning rate of token embedding and output matrix.
        """
        lengths, unit = self.schedule, self.global_batch_size
        decay = lengths.lr_decay_iters or self.training.train_iters
        warmup: float = lengths.lr_warmup_iters
        annealing = lengths.lr_wsd_decay_iters
        if decay is None:
            unit = 1
            decay = lengths.lr_decay_samples or self.train_samples
            warmup, annealing = lengths.lr_warmup_samples, lengths.lr_wsd_decay_samples
        if lengths.lr_warmup_fraction is not None:
            warmup = lengths.lr_warmup_fraction * decay
        return self.optimizer.learning_rate_schedule(
            decay_samples=decay * unit,
            warmup_samples=int(warmup * unit),
            wsd_decay_samples=None if annealing is None else annealing * unit,
            decoupled=decoupled,
        )

    def weight_decay_schedule(self) -> WeightDecaySchedule:
        """Returns the weight decay as a function of consumed samples."""
        return self.optimizer.weight_decay_schedule(samples=self.train_samples)
