"""A small copy of a run that has its structure: layout, model, batches and settings.

Importing this module does not import torch.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from megatron_models import (
    ConfigError,
    ModelConfig,
    layers_alike,
    shrunk,
    smaller_sizes,
    with_layers,
)
from megatron_optim import LossScaleConfig, OffloadConfig, StateFormatConfig
from megatron_parallel import DataParallelConfig, LayoutError, ParallelLayout, RecomputeConfig
from megatron_parallel.pipeline import PipelineConfig, check_micro_batches

from megatron_train.config.model_checks import refuse_feature
from megatron_train.config.options import options_of
from megatron_train.config.pool_checks import slice_multiple
from megatron_train.config.run import RunConfig
from megatron_train.config.run_sections import sections
from megatron_train.config.sections import (
    GRAPH_WARMUP_STEPS,
    EvaluationConfig,
    LoggingConfig,
    ScheduleConfig,
)
from megatron_train.errors import TrainError
from megatron_train.prove.layout import small_layout

BUCKET: Final = 3000
"""Elements of a bucket of gradients, so that several buckets and cut parameters remain."""

MAX_PARAMETERS: Final = 4_000_000
"""Parameters of a small model, at most; the gradients of all steps are kept."""

SEQUENCE: Final = 16
"""Tokens of a sample, at least."""


_LENGTHS: Final = ("train_iters", "train_samples", "exit_interval")


@dataclass(frozen=True)
class Change:
    """A setting with another value in the small run."""

    setting: str
    before: Any
    after: Any


@dataclass(frozen=True)
class ShrunkRun:
    """A small copy of a run.

    Attributes:
        run: The copy, in float64 on CPUs.
        one_rank: The same training on one rank, without parallelism and recomputation.
        changes: Sizes that differ from the run.
        not_covered: What the run has and the copy does not.
    """

    run: RunConfig
    one_rank: RunConfig
    changes: tuple[Change, ...]
    not_covered: tuple[str, ...]


def shrink_run(run: RunConfig, steps: int, max_ranks: int) -> ShrunkRun:
    """Returns a small copy of a run.

    Every pipeline stage keeps a layer of each kind that it has, and every size that an axis of the
    layout cuts stays cut.

    Args:
        run: The run.
        steps: Number of steps.
        max_ranks: Maximum number of ranks of the copy.

    Raises:
        TrainError: The run has one rank, depends on its layout by design, or cannot shrink so far.
    """
    if run.layout.world_size == 1:
        raise TrainError(
            "there is nothing to prove on one rank; give a layout, such as "
            "--tensor-model-parallel-size 2 or --world-size 2"
        )
    if run.layout.pool > 1:
        refuse_feature(
            run.model,
            "equal_layouts",
            "{setting} {why}: no layout with several data or context "
            "parallel ranks equals one rank",
        )
    layout = small_layout(run.layout, max_ranks, least_tp=4 if _shares_heads(run) else 2)
    stages = kept_layers(run, layout)
    layers = [layer for stage in stages for layer in stage]
    length = _sequence_length(run, layout)
    model = _small_model(run, layout, layers, length)
    small = _assembled(_with_small_extensions(run), layout, stages, model, length, steps)
    return ShrunkRun(small, _one_rank(small), tuple(_changes(run, small)), tuple(_not_covered(run)))


# -- layers and model --------------------------------------------------------------------------


def kept_layers(run: RunConfig, layout: ParallelLayout) -> list[list[int]]:
    """Returns the layers that each stage of a small layout keeps; see `choose_layers`."""
    return choose_layers(layers_alike(run.model), _split(run), layout.pp * layout.vpp)


def choose_layers(kinds: Sequence[int], split: Sequence[range], stages: int) -> list[list[int]]:
    """Returns layers for each stage of a shorter pipeline, ascending over all stages.

    The first and the last stage remain, and others between them at equal distances. A stage has a
    layer of each kind that it had, the first with several has two, and the last has the last layer.
    A kind of which no stage has a layer is added to the nearest one before.

    Args:
        kinds: For each layer of the model, the first layer that is equal to it.
        split: Layers of each stage.
        stages: Number of stages of the shorter pipeline.
    """
    last = len(split) - 1
    picked = [index * last // max(stages - 1, 1) for index in range(stages)]
    chosen = [_first_of_each(kinds, split[stage]) for stage in picked]
    if split[-1] and split[-1][-1] not in chosen[-1]:
        chosen[-1].append(split[-1][-1])
    for own, stage in zip(chosen, picked, strict=True):
        if len(split[stage]) > 1:
            own += [layer for layer in split[stage] if layer not in own][: max(0, 2 - len(own))]
            break
    held = {kinds[layer] for own in chosen for layer in own}
    for number, layers in enumerate(split):
        for layer in layers:
            if kinds[layer] not in held:
                held.add(kinds[layer])
                nearest = max(i for i, stage in enumerate(picked) if stage <= number)
                chosen[nearest].append(layer)
    return [sorted(own) for own in chosen]


def _first_of_each(kinds: Sequence[int], layers: range) -> list[int]:
    return list({kinds[layer]: layer for layer in reversed(layers)}.values())


def _split(run: RunConfig) -> Sequence[range]:
    if run.layout.pp == 1:
        return (range(run.model.depth),)
    return run.layer_split


def _small_model(
    run: RunConfig, layout: ParallelLayout, layers: Sequence[int], length: int
) -> ModelConfig:
    fewer = with_layers(run.model, layers)
    cuts = _cuts(fewer, run.layout)

    def accepts(model: ModelConfig) -> bool:
        try:
            model.check_layout(layout)
        except ConfigError:
            return False
        positions = model.embedding.max_position_embeddings
        fits = getattr(model, "longest_sequence", positions) >= length
        return fits and _cuts(model, layout) == cuts

    small = shrunk(fewer, accepts, run.data.seq_length)
    if not accepts(small):
        raise TrainError(
            f"no small model is cut by {layout} as the model is by {run.layout}; raise --max-ranks"
        )
    _refuse_large(small)
    return small


def _refuse_large(model: ModelConfig) -> None:
    """Refuses a model whose sizes do not shrink, such as those of single layers."""
    sizes = {name: spec.sharding.shape for name, spec in model.parameters().items()}
    count = sum(map(math.prod, sizes.values()))
    if count > MAX_PARAMETERS:
        name = max(sizes, key=lambda each: math.prod(sizes[each]))
        raise TrainError(
            f"the small model still has {count:,} parameters, more than {MAX_PARAMETERS:,}, such "
            f"as {name} of {list(sizes[name])}; give a model with smaller sizes there"
        )


def _cuts(model: ModelConfig, layout: ParallelLayout) -> dict[str, tuple[bool, ...]]:
    """Returns for each parameter whether ranks share its entries or hold a single expert."""
    found: dict[str, tuple[bool, ...]] = {}
    for name, spec in model.parameters().items():
        cut = spec.sharding
        entries = layout.tp if cut.dim is None else cut.shape[cut.dim]
        shared = cut.spill_dim is not None and entries < layout.tp
        found[name] = (shared, cut.experts and cut.shape[0] == layout.ep)
    return found


def _shares_heads(run: RunConfig) -> bool:
    return any(shared for shared, *_ in _cuts(run.model, run.layout).values())


# -- settings ----------------------------------------------------------------------------------


def _sequence_length(run: RunConfig, layout: ParallelLayout) -> int:
    """Returns the length of samples: a multiple of what context and sequence parallelism cut."""
    parts = 2 * layout.cp * layout.tp
    return min(run.data.seq_length, -(-SEQUENCE // parts) * parts)


def _assembled(
    run: RunConfig,
    layout: ParallelLayout,
    stages: Sequence[Sequence[int]],
    model: ModelConfig,
    length: int,
    steps: int,
) -> RunConfig:
    """Returns the run with a small model and layout, and batches of a few samples."""
    training, recompute, comm = run.training, run.recompute, run.placement.cp_comm_type
    pipeline = _pipeline(run, layout, stages, len(model.multi_token()))
    if len(comm) > 1:
        comm = tuple(comm[layer] for stage in stages for layer in stage)
    samples = min(2, training.micro_batch_size)
    most = run.batch_sizes.last // run.micro_batch_times_data_parallel_size
    count = _micro_batches(pipeline, layout, max(1, most))
    tokens = training.max_seqlen_per_dp_cp_rank
    return replace(
        run,
        model=model,
        layout=layout,
        pipeline=pipeline,
        placement=replace(run.placement, cp_comm_type=comm),
        data=replace(run.data, seq_length=length),
        training=replace(
            training,
            micro_batch_size=samples,
            global_batch_size=samples * count * (layout.dp or 1),
            train_iters=steps,
            train_samples=None,
            rampup_batch_size=None,
            step_batch_size_schedule=None,
            decrease_batch_size_if_needed=False,
            bf16=False,
            fp16=False,
            float64=True,
            compile=False,
            compile_scope="stage",
            cuda_graph_impl="none",
            cuda_graph_warmup_steps=GRAPH_WARMUP_STEPS,
            deterministic_mode=False,
            device="cpu",
            exit_interval=None,
            exit_duration_in_mins=None,
            max_seqlen_per_dp_cp_rank=None if tokens is None else _room(run, layout, length),
        ),
        optimizer=replace(run.optimizer, lr_decay_style="constant", lr_warmup_init=0.0),
        loss_scale=LossScaleConfig(),
        state_formats=StateFormatConfig(),
        offload=OffloadConfig(),
        schedule=ScheduleConfig(),
        data_parallel=replace(
            run.data_parallel,
            ddp_bucket_size=BUCKET,
            accumulate_allreduce_grads_in_fp32=True,
            check_for_nan_in_loss_and_grad=True,
        ),
        recompute=replace(
            recompute,
            num_layers=recompute.num_layers and min(2, recompute.num_layers),
            cpu_offloading_num_layers=min(1, recompute.cpu_offloading_num_layers),
        ),
        evaluation=EvaluationConfig(eval_iters=0),
        checkpoint=replace(run.checkpoint, save=None, save_interval=None, keep_last=None),
        logging=LoggingConfig(progress=False),
    )


def _pipeline(
    run: RunConfig, layout: ParallelLayout, stages: Sequence[Sequence[int]], depths: int
) -> PipelineConfig:
    """Returns the schedule of the run with the layers of the small stages."""
    if layout.pp == 1:
        return run.pipeline
    text = "|".join("t" * len(stage) for stage in stages)
    group = run.pipeline.group_size
    return replace(
        run.pipeline,
        stages=f"E{text}{'m' * depths}L",
        first=None,
        last=None,
        count_embedding=False,
        count_loss=False,
        group_size=None if group is None else layout.pp + min(1, group - run.layout.pp),
    )


def _micro_batches(pipeline: PipelineConfig, layout: ParallelLayout, most: int) -> int:
    """Returns how many micro-batches a rank has: one more than pipeline ranks, or the next number.

    Args:
        pipeline: Schedule, which may need another number.
        layout: The small layout.
        most: Number in the run.
    """
    if most == 1:
        return 1
    schedule = pipeline.resolve_schedule(layout)
    for count in range(min(most, layout.pp + 1), 4 * layout.pp * layout.vpp + 1):
        try:
            check_micro_batches(schedule, layout.pp, layout.vpp, count, pipeline.group_size)
        except LayoutError:
            continue
        return count
    return most


def _room(run: RunConfig, layout: ParallelLayout, length: int) -> int:
    """Returns the tokens of a rank in a pool that hold the same share of a sample as in the run."""
    multiple = math.lcm(slice_multiple(run), 2 * layout.tp)
    share = (run.training.max_seqlen_per_dp_cp_rank or 0) * length / run.data.seq_length
    return max(1, round(share / multiple)) * multiple


def _with_small_extensions(run: RunConfig) -> RunConfig:
    """Returns the run with the smallest sizes in the sections of its extensions that fit."""
    for name, section in run.extension_settings.items():
        if dataclasses.is_dataclass(section):
            run = _with_small_section(run, name, section)
    return run


def _with_small_section(run: RunConfig, name: str, section: Any) -> RunConfig:
    found = run

    def accepts(copy: Any) -> bool:
        nonlocal found
        try:
            found = replace(run, extension_settings={**run.extension_settings, name: copy})
        except TrainError:
            return False
        return True

    smaller_sizes(section, accepts)
    return found


def _one_rank(run: RunConfig) -> RunConfig:
    """Returns the same training on one rank, which holds everything and recomputes nothing."""
    return replace(
        run,
        model=type(run.model).from_dict(run.model.to_dict()),
        layout=ParallelLayout(dp=1),
        placement=type(run.placement)(linear_product=run.placement.linear_product),
        pipeline=PipelineConfig(),
        data=replace(run.data, broadcast_batches=False),
        training=replace(run.training, max_seqlen_per_dp_cp_rank=None),
        data_parallel=DataParallelConfig(gradient_accumulation_fusion=False),
        recompute=RecomputeConfig(),
    )


# -- description -------------------------------------------------------------------------------


def _changes(run: RunConfig, small: RunConfig) -> Iterator[Change]:
    """Yields the sizes that differ, by the flags that set them."""
    for name in ("tp", "cp", "pp", "vpp", "dp", "ep", "expert_tp"):
        before, after = getattr(run.layout, name), getattr(small.layout, name)
        experts = run.model.expert_parallel or name not in ("ep", "expert_tp")
        if before != after and experts:
            yield Change(name, before, after)
    shown = ("model", "data", "training", *small.extension_settings)
    for name, (_, cls) in sections(run.model.kind, run.selected_extensions).items():
        for option in options_of(cls, name) if name in shown else ():
            if option.kind != "integer" or option.repeated or option.name in _LENGTHS:
                continue
            before = getattr(run.section_by_name(name), option.name)
            after = getattr(small.section_by_name(name), option.name)
            if before is None and option.name == "global_batch_size":
                before = run.global_batch_size
            if before != after:
                yield Change(option.flag, before, after)


def _not_covered(run: RunConfig) -> Iterator[str]:
    """Yields what the small run leaves out."""
    precision = "float32" if run.training.float64 else run.training.precision
    yield f"{precision} rounding and fused GPU kernels"
    yield "NCCL"
    if run.training.compile:
        yield "--compile"
    if run.training.deterministic_mode:
        yield "--deterministic-mode"
    yield "the corpus"
    yield "the learning-rate schedule"
    if run.checkpoint.load or run.checkpoint.save or run.checkpoint.pretrained_checkpoint:
        yield "checkpoints"
