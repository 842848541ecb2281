"""The section ``placement``: how ranks compute together what the layout cuts."""

from dataclasses import dataclass
from typing import Literal

from megatron_train.config.fields import setting


@dataclass(frozen=True)
class PlacementConfig:
    """How a model is placed on the ranks of its layout, and what its linear layers multiply by.

    With mesh, dtype, device and recomputation it makes the `megatron_models.Placement` of a run.
    """

    sequence_parallel: bool = setting(
        False, "cut activations between tensor parallel regions along the sequence"
    )
    tp_comm_overlap: bool = setting(
        False,
        "with --sequence-parallel, gather and scatter activations in chunks while matrix products "
        "of other chunks are computed",
    )
    cp_comm_type: tuple[Literal["p2p", "a2a", "allgather", "a2a+p2p"], ...] = setting(
        ("p2p",),
        "how attention goes over context parallel ranks, for all layers or for each: ring, heads "
        "scattered, keys gathered, heads scattered inside and a ring outside",
    )
    context_parallel_split: Literal["zigzag", "per_document"] = setting(
        "zigzag",
        "whether context parallelism cuts the whole sequence, or every packed document by itself, "
        "so that ranks have equal work (our name)",
    )
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = setting(
        "allgather",
        "how tokens get to experts on other ranks: all tokens to all of them, or each to its own",
    )
    cross_entropy_fusion_impl: Literal["native", "te", "linear"] = setting(
        "native",
        "how output layer and loss are computed: with the logits of all tokens (native; te is the "
        "same here), or with those of 1,024 at a time, and again in the backward pass (linear)",
    )
    linear_product: str = setting(
        "plain",
        "what linear layers multiply by: their weight alone (plain), or a product that is "
        "installed, such as lora, low-rank adapters of a model that is frozen (our name)",
    )
