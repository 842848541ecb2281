"""The configuration of a whole run, and the checks that involve several of its sections."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from megatron_optim import OptimError, find_rule
from megatron_parallel import ParallelLayout
from megatron_parallel.errors import FieldError
from megatron_parallel.pipeline import check_micro_batches, find_schedule_kind

from megatron_train.config.context_parallel_checks import check_context_parallel
from megatron_train.config.cuda_graph_checks import check_cuda_graphs
from megatron_train.config.extensions import (
    SelectedExtensions,
    check_task,
    extension_checks,
    extension_sections,
    refuse_unselected_settings,
)
from megatron_train.config.kernel_backends import check_kernel_backends
from megatron_train.config.model_checks import (
    check_expert_overlap,
    check_features,
    check_initial_weights,
    check_model_layout,
    check_parameter_names,
    check_per_layer_logging,
)
from megatron_train.config.options import options_of
from megatron_train.config.parallel_checks import (
    check_data_parallel,
    check_placement,
    check_recompute,
)
from megatron_train.config.precision_checks import (
    check_formats_of_state,
    check_loss_scale,
    check_offload,
    check_products_in_low_precision,
)
from megatron_train.config.products import PLAIN, check_product
from megatron_train.config.run_sections import (
    DEFAULT_KIND,
    RunSections,
    named_by_flags,
    run_options,
    sections,
)
from megatron_train.config.unread_settings import refuse_unread_settings
from megatron_train.config.values import Values
from megatron_train.errors import TrainError, UsageError, collect_errors, raise_collected

Section = TypeVar("Section")


@dataclass(frozen=True)
class RunConfig(RunSections):
    """The configuration of a run: one field for each section. All sections are checked."""

    def __post_init__(self) -> None:
        if self.layout.dp is None:
            object.__setattr__(self, "layout", self.layout.resolve(_model_ranks(self.layout)))
        self._place_stages()
        if self.placement.sequence_parallel and self.layout.tp == 1:  # there is nothing to split
            alone = dataclasses.replace(self.placement, sequence_parallel=False)
            object.__setattr__(self, "placement", alone)
        self._complete_extension_sections()
        errors: list[str] = []
        checks: tuple[Callable[[], None], ...] = (
            self._check_length,
            self._check_batch,
            lambda: check_placement(self),
            lambda: check_data_parallel(self),
            self._check_compile_scope,
            lambda: check_cuda_graphs(self),
            lambda: check_recompute(self),
            lambda: check_context_parallel(self),
            lambda: check_kernel_backends(self),
            lambda: check_model_layout(self.model, self.layout, self.placement),
            lambda: check_features(self),
            lambda: check_products_in_low_precision(self),
            lambda: check_initial_weights(self.model, self.checkpoint),
            lambda: check_per_layer_logging(self.model, self.logging),
            self._check_parameter_names,
            lambda: check_loss_scale(self),
            lambda: check_formats_of_state(self),
            lambda: check_offload(self),
            self._check_evaluation,
            self._check_schedules,
            lambda: refuse_unread_settings(self),
            *(
                partial(check, self)
                for check in extension_checks(self.model.kind, self.selected_extensions)
            ),
        )
        for check in checks:
            with collect_errors(errors):
                check()
        raise_collected(errors)
        check_expert_overlap(self)
        self._check_pipeline()

    def _complete_extension_sections(self) -> None:
        """Adds default sections of task, update rule and product where none are given."""
        check_task(self.model.kind, self.task)
        check_product(self.product)
        known = extension_sections(self.model.kind, self.selected_extensions)
        if unknown := self.extension_settings.keys() - known.keys():
            raise TrainError(
                f"extension_settings: {self.selected_extensions} add no section "
                f"{', '.join(sorted(unknown))}"
            )
        settings = {
            name: self.extension_settings[name]
            if name in self.extension_settings
            else section.config()
            for name, section in known.items()
        }
        object.__setattr__(self, "extension_settings", settings)
        rule = find_rule(self.optimizer.optimizer).section
        own = dataclasses.replace(self.optimizer, settings=rule and settings[rule.name])
        object.__setattr__(self, "optimizer", own)

    def _check_length(self) -> None:
        """Refuses samples that are longer than the model's maximum."""
        positions = self.model.embedding.max_position_embeddings
        longest = getattr(self.model, "longest_sequence", positions)  # RoBERTa skips the first two
        if self.data.seq_length > longest:
            unused = f" without the first {positions - longest}" if longest < positions else ""
            raise TrainError(
                f"--seq-length {self.data.seq_length} exceeds --max-position-embeddings "
                f"{positions}{unused}; lower the first or raise the second"
            )

    def _check_batch(self) -> None:
        """Refuses batch sizes that cannot be divided over the ranks."""
        training, sizes = self.training, self.batch_sizes
        given = training.global_batch_size
        if training.step_batch_size_schedule is not None and given not in (None, sizes.last):
            raise TrainError(
                f"--global-batch-size {given} is not {sizes.last}, the last batch size of "
                "--step-batch-size-schedule; leave it out"
            )
        sizes.check(training.micro_batch_size, self.data_parallel_size)

    def _place_stages(self) -> None:
        """Completes the layout with the mapping of stages to ranks that the schedule needs."""
        with named_by_flags("pipeline"):
            object.__setattr__(self, "layout", self.pipeline.resolve_layout(self.layout))

    def _check_pipeline(self) -> None:
        """Refuses settings that the pipeline schedule does not support."""
        layout = self.layout
        with named_by_flags("pipeline"):
            _ = self.layer_split
            schedule = self.pipeline.resolve_schedule(layout)
            group = self.pipeline.group_size
            for size in self.batch_sizes.sizes:
                count = size // self.micro_batch_times_data_parallel_size
                check_micro_batches(schedule, layout.pp, layout.vpp, count, group)
        whole = self.training.compile and self.training.compile_scope == "stage"
        if whole and find_schedule_kind(schedule).splits_backward:
            raise TrainError(
                f"--pipeline-schedule {schedule} splits backward passes, which torch does not run "
                "with compiled stages; use --compile-scope layer, or leave out --compile"
            )

    def _check_compile_scope(self) -> None:
        """Refuses a scope of compilation without compilation."""
        if self.training.compile_scope == "layer" and not self.training.compile:
            raise TrainError(
                "--compile-scope layer has no effect without --compile; give both or leave it out"
            )

    def _check_evaluation(self) -> None:
        """Refuses an evaluation without data, and test data without an evaluation."""
        data = self.data
        valid = data.data_path or data.valid_data_path or data.mock_data
        if self.evaluation.eval_iters and not valid:
            raise TrainError(
                "no validation data: give --valid-data-path, or --eval-iters 0 to skip evaluation"
            )
        if data.test_data_path and not self.evaluation.eval_iters:
            raise TrainError(
                "--test-data-path has no effect with --eval-iters 0; leave out one of them"
            )

    def _check_parameter_names(self) -> None:
        """Refuses patterns of names that match no parameter."""
        if self.product == PLAIN:
            check_parameter_names(self.model, self.optimizer)

    def _check_schedules(self) -> None:
        """Refuses invalid schedules of learning rate and weight decay."""
        if self.train_iters == 0:
            raise TrainError(
                f"--train-samples {self.training.train_samples} is less than one step of "
                f"{self.batch_sizes.at(0)} samples; raise it or lower --global-batch-size"
            )
        listed = self.training.iterations_to_skip
        if listed and max(listed) > self.train_iters:
            raise TrainError(
                f"--iterations-to-skip {max(listed)} is beyond the last step {self.train_iters}; "
                "leave it out"
            )
        unit, other = ("samples", "iters") if self.training.train_samples else ("iters", "samples")
        self.schedule.refuse_other_unit(unit, other)
        length = self.train_samples if unit == "samples" else self.train_iters
        self.schedule.check_lengths(unit, length, self.optimizer.lr_decay_style)
        flags = {"max_lr": "--lr", "min_lr": "--min-lr", "init_lr": "--lr-warmup-init"}
        flags["style"] = "--weight-decay-incr-style"
        for end in ("start", "end"):
            given = getattr(self.optimizer, f"{end}_weight_decay") is not None
            flags[end] = f"--{end}-weight-decay" if given else "--weight-decay"
        try:
            self.learning_rate_schedule()
            self.weight_decay_schedule()
        except OptimError as error:
            raise TrainError(error.format_message(flags)) from None
        if self.optimizer.decoupled_lr is None:
            return
        flags["max_lr"] = "--decoupled-lr"
        if self.optimizer.decoupled_min_lr is not None:
            flags["min_lr"] = "--decoupled-min-lr"
        try:
            self.learning_rate_schedule(decoupled=True)
        except OptimError as error:
            raise TrainError(error.format_message(flags)) from None


def build_run(values: Values, world_size: int | None = 1, kind: str = DEFAULT_KIND) -> RunConfig:
    """Builds and checks the configuration of a run from given values.

    Args:
        values: Given values by section and name.
        world_size: Number of ranks. None means those of one model replica.
        kind: Kind of the model.

    Raises:
        TrainError: A value is invalid, or a combination of values.
        UsageError: A required value is missing.
    """
    flags = {option.key: option.flag for option in run_options(kind)}
    selected = SelectedExtensions.from_values(values, kind)
    check_task(kind, selected.task or "")
    check_product(selected.product or PLAIN)
    refuse_unselected_settings(values, kind, selected, flags)
    missing_options = list(values.missing(run_options(kind, selected)))
    missing = [option.flag for option in missing_options if not option.derived_default]
    if not {"training.train_iters", "training.train_samples"} & values.given.keys():
        missing.append("--train-iters (or --train-samples)")
    if not missing and [option.key for option in missing_options] == ["model.vocab_size"]:
        raise UsageError(
            "the vocabulary size is unknown: give --tokenizer-model, or --vocab-file with "
            "--merge-file, or --vocab-size"
        )
    if missing:
        raise UsageError(
            f"missing: {', '.join(missing)}; give them as flags, by --recipe or in --config"
        )
    return RunConfig(**build_sections(values, world_size, kind, selected))


def build_sections(
    values: Values, world_size: int | None, kind: str, selected: SelectedExtensions
) -> dict[str, Any]:
    """Builds every section of a run, without the checks of several sections.

    Args:
        values: Given values by section and name; none is missing.
        world_size: Number of ranks. None means those of one model replica.
        kind: Kind of the model.
        selected: The extensions of the run.

    Returns:
        The arguments of `RunSections`.

    Raises:
        TrainError: A value is invalid.
    """
    section_configs, errors = {}, list[str]()
    for name, (_, cls) in sections(kind, selected).items():
        with collect_errors(errors):
            section_configs[name] = build_section(name, cls, values)
    raise_collected(errors)
    layout = section_configs["layout"]
    ranks = _model_ranks(layout) if world_size is None else world_size
    section_configs["layout"] = _resolve(layout, ranks)
    extension_settings = {
        name: section_configs.pop(name) for name in extension_sections(kind, selected)
    }
    return {**section_configs, "extension_settings": extension_settings}


def build_section(name: str, cls: type[Section], values: Values, **fixed: Any) -> Section:
    """Builds a section from the given values.

    Args:
        name: Name of the section.
        cls: Dataclass of the section.
        values: Given values.
        fixed: Values of fields that are not settings.

    Raises:
        TrainError: The section refuses a value; the message names it as it was given.
    """
    try:
        return cls(**values.section(name), **fixed)
    except FieldError as error:
        spelling = {option.name: values.name_in_source(option) for option in options_of(cls, name)}
        raise TrainError(error.format_message(spelling)) from None


def _resolve(layout: ParallelLayout, world_size: int) -> ParallelLayout:
    needed = _model_ranks(layout)
    if world_size % needed:
        options = options_of(ParallelLayout, "layout")
        degrees = [
            o.command_line(getattr(layout, o.name))
            for o in options
            if o.name in ("tp", "cp", "ep", "pp", "etp") and (getattr(layout, o.name) or 1) > 1
        ]
        raise TrainError(
            f"{' '.join(degrees)} needs a multiple of {needed} ranks, but there "
            f"{'is 1' if world_size == 1 else f'are {world_size}'}; start with --nproc-per-node "
            f"{needed} or torchrun"
        )
    with named_by_flags("layout"):
        return layout.resolve(world_size)


def _model_ranks(layout: ParallelLayout) -> int:
    """Returns the number of ranks of one model replica with its experts."""
    experts = layout.expert_tp * layout.ep
    return math.lcm(layout.tp * layout.cp, experts) * layout.pp
