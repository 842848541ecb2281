"""Memory that a rank needs, from the configuration of a run alone."""

from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING

from megatron_models import TrainingMemory, training_memory
from megatron_optim import state_bytes
from megatron_parallel.pipeline import simulate

from megatron_train.config.products import PLAIN
from megatron_train.config.run_sections import RunSections

if TYPE_CHECKING:
    from megatron_parallel.tensor_parallel import Product


def rank_memory(
    run: RunSections,
    *,
    seq_length: int,
    sequence_parallel: bool,
    layers: int | None,
    activations: bool = True,
) -> TrainingMemory:
    """Returns the bytes of a rank of the first stage, with the activations of one micro-batch.

    Args:
        run: The run, with a resolved layout.
        seq_length: Tokens of a sample.
        sequence_parallel: Whether activations between tensor-parallel layers are sharded.
        layers: Number of layers of the rank. None means the whole model as one stage.
        activations: Whether activations are counted.
    """
    precision = run.training.precision
    products: Mapping[str, Product] = {}
    if run.product != PLAIN:
        from megatron_train.products import products_of  # imports torch

        products = products_of(run)
    of_rule = state_bytes(run.optimizer, run.state_formats)
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
        state_bytes=lambda sharding: of_rule(sharding) + run.averages.average_bytes,
        main_bytes=run.state_formats.main_bytes(precision),
        products=products,
        saves_logits=run.placement.cross_entropy_fusion_impl != "linear",
        activations=activations,
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
