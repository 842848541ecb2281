"""Memory that a rank needs, from the configuration of a run alone."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Final, Literal

from megatron_models import TrainingMemory, training_memory
from megatron_models.fused_operations import FUSED, SEPARATE
from megatron_optim import state_bytes
from megatron_optim.offload_config import GRADIENT_BYTES, MAIN_BYTES
from megatron_parallel import Sharding
from megatron_parallel.pipeline import simulate

from megatron_train.config.kernel_backends import chosen_backends
from megatron_train.config.products import PLAIN
from megatron_train.config.run_sections import RunSections

if TYPE_CHECKING:
    from megatron_parallel.tensor_parallel import Product

_LOSS_SAVES: Final[Mapping[str, Literal["input", "gradients"]]] = {
    "linear": "gradients",
    "linear-recompute": "input",
}


def rank_memory(
    run: RunSections,
    *,
    seq_length: int,
    sequence_parallel: bool,
    layers: int | None,
    activations: bool = True,
) -> TrainingMemory:
    """Returns the bytes of a rank of the first stage, with the activations of one micro-batch.

    Optimizer state in host memory is not counted; see `host_memory`.

    Args:
        run: The run, with a resolved layout.
        seq_length: Tokens of a sample.
        sequence_parallel: Whether activations between tensor-parallel layers are sharded.
        layers: Number of layers of the rank. None means the whole model as one stage.
        activations: Whether activations are counted.
    """
    kept = 1.0 - run.offload.fraction
    of_rule, averages = _state_bytes(run), run.averages.average_bytes
    return _rank_memory(
        run,
        lambda sharding: kept * of_rule(sharding) + averages,
        kept * run.state_formats.main_bytes(run.training.precision),
        seq_length=seq_length,
        sequence_parallel=sequence_parallel,
        layers=layers,
        activations=activations,
    )


def host_memory(run: RunSections, layers: int | None) -> int:
    """Returns the bytes of optimizer state, and of its gradients, in host memory.

    Args:
        run: The run, with a resolved layout.
        layers: As for `rank_memory`.
    """
    of_rule, fraction = _state_bytes(run), run.offload.fraction
    in_full = MAIN_BYTES + GRADIENT_BYTES
    held = _rank_memory(
        run,
        lambda sharding: fraction * (of_rule(sharding) + in_full),
        0.0,
        seq_length=1,
        sequence_parallel=False,
        layers=layers,
        activations=False,
    )
    return held.optimizer


def _state_bytes(run: RunSections) -> Callable[[Sharding], float]:
    return state_bytes(run.optimizer, run.state_formats)


def _rank_memory(
    run: RunSections,
    state: Callable[[Sharding], float],
    main_bytes: float,
    *,
    seq_length: int,
    sequence_parallel: bool,
    layers: int | None,
    activations: bool,
) -> TrainingMemory:
    """Returns the bytes of a rank with ``state`` and main parameters of these bytes."""
    precision = run.training.precision
    products: Mapping[str, Product] = {}
    if run.product != PLAIN:
        from megatron_train.products import products_of  # imports torch

        products = products_of(run)
    return training_memory(
        run.model,
        seq_length,
        run.training.micro_batch_size,
        "float32" if precision == "float64" else precision,  # float64 needs more
        layout=run.layout,
        data_parallel=run.data_parallel,
        sequence_parallel=sequence_parallel,
        layers=layers,
        recompute=run.recompute,
        dispatcher=run.placement.moe_token_dispatcher_type,
        state_bytes=state,
        main_bytes=main_bytes,
        products=products,
        loss_saves=_LOSS_SAVES.get(run.placement.cross_entropy_fusion_impl, "logits"),
        activations=activations,
        # Compiled layers call no fused operation without a choice.
        backends=(dict.fromkeys(FUSED, SEPARATE) if run.training.compile else {})
        | chosen_backends(run),
        attention_dropout=run.training.attention_dropout > 0,
        low_precision=run.low_precision,
    )


def micro_batches_in_flight(run: RunSections, micro_batches: int) -> Fraction:
    """Returns the largest number of micro-batches whose activations the first rank holds.

    Args:
        run: The run, with a resolved layout.
        micro_batches: Micro-batches of a step on each rank.
    """
    layout = run.layout
    if layout.pp * layout.vpp == 1:
        return Fraction(1)
    schedule = run.pipeline.resolve_schedule(layout)
    group = run.pipeline.group_size
    timeline = simulate(schedule, layout.pp, micro_batches, layout.vpp, group_size=group)
    return timeline.peak_in_flight[0]
