"""Settings of low-rank adapters. Importing this module does not import torch."""

from dataclasses import dataclass, field
from typing import Final

from megatron_parallel.errors import LayoutError
from megatron_parallel.extensions import Section
from megatron_parallel.tensor_parallel.product_kinds import ProductKind


@dataclass(frozen=True)
class LoRAConfig:
    """Size of low-rank adapters (Hu et al. 2021), and the layers that have one.

    Raises:
        LayoutError: `rank` or `alpha` is not positive, or `target_modules` is empty.
    """

    rank: int = field(
        default=8,
        metadata={
            "flag": "--lora-rank",
            "help": "columns of A and B, the two matrices of an adapter",
        },
    )
    alpha: float = field(
        default=16.0,
        metadata={
            "flag": "--lora-alpha",
            "help": "scale of adapters, divided by their rank",
        },
    )
    target_modules: tuple[str, ...] = field(
        default=("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
        metadata={
            "flag": "--lora-target-modules",
            "help": "linear layers with an adapter, by Megatron-Core's names",
        },
    )

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise LayoutError("{rank} must be at least 1", vars(self))
        if not self.alpha > 0:
            raise LayoutError("{alpha} must be positive", vars(self))
        if not self.target_modules:
            raise LayoutError(
                "{target_modules:name} is empty; give linear_qkv or other layers", vars(self)
            )


KIND: Final = ProductKind(
    "lora",
    "low-rank adapters; all other parameters of the model are frozen",
    "megatron_parallel.tensor_parallel.lora:lora_products",
    Section("lora", LoRAConfig, "low-rank adapters (LoRA)"),
)
