"""The description of a run that is printed before its first step."""

from collections.abc import Iterator, Sequence

import torch
from megatron_kernels import BackendChoice
from megatron_models import parameter_count

from megatron_train.config.run import RunConfig
from megatron_train.config.run_sections import run_options
from megatron_train.config.values import Values


def describe_run(
    config: RunConfig,
    values: Values | None,
    facts: dict[str, str],
    dtype: torch.dtype,
    kernels: Sequence[BackendChoice] = (),
) -> Iterator[str]:
    """Yields lines about environment, configuration, layout, model size and backends."""
    yield "environment: " + ", ".join(f"{name} {value}" for name, value in facts.items())
    if values is not None:
        yield "configuration (settings that are not listed have their defaults):"
        options = run_options(config.model.kind)
        for key in (option.key for option in options if option.key in values.given):
            given = values.given[key]
            value = (
                " ".join(map(str, given.value)) if isinstance(given.value, tuple) else given.value
            )
            yield f"  {key}: {value}  [{given.origin}]"
    count = parameter_count(config.model)
    precision = str(dtype).removeprefix("torch.")
    layout = config.layout
    if layout.world_size > 1:
        yield f"layout: {describe_layout(config)}"
    yield (
        f"model: {count:,} parameters (without vocabulary padding) in {precision}; "
        f"{_span(config.batch_sizes.sizes)} samples a step in {_micro_batches(config)}"
    )
    if kernels:
        yield "kernels of plain calls: " + "; ".join(
            f"{choice.op} {choice.backend} ({choice.reason})" for choice in kernels
        )


def _micro_batches(config: RunConfig) -> str:
    """Returns the micro-batches of a step on each rank."""
    layout, training = config.layout, config.training
    if layout.hybrid_cp:
        max_tokens = training.max_seqlen_per_dp_cp_rank
        return f"rows of at most {max_tokens} tokens a rank, in a pool of {layout.pool}"
    counts = [
        size // config.micro_batch_times_data_parallel_size for size in config.batch_sizes.sizes
    ]
    batches = "micro-batch" if max(counts) == 1 else "micro-batches"
    share = "" if layout.dp == 1 else f" on each of {layout.dp} data parallel ranks"
    return f"{_span(counts)} {batches} of {training.micro_batch_size}{share}"


def _span(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least} to {most}"


def describe_layout(config: RunConfig) -> str:
    """Returns the number of ranks and the sizes of the axes of the layout."""
    layout = config.layout
    if layout.world_size == 1:
        return "1 rank"
    cut = ", sequence parallel" if config.placement.sequence_parallel else ""
    return f"{layout.world_size} ranks, {layout}{cut}"
