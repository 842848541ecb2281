"""The entry in the group ``megatron.products``. Does not import torch."""

from dataclasses import dataclass, field

from megatron_parallel import LayoutError
from megatron_parallel.extensions import Section
from megatron_parallel.tensor_parallel import ProductKind


@dataclass(frozen=True)
class ScaledConfig:
    """Settings of the scaled product."""

    start: float = field(
        default=1.0,
        metadata={"flag": "--scaled-start", "help": "initial factor of each output"},
    )

    def __post_init__(self) -> None:
        if self.start == 0:
            raise LayoutError("{start} makes every gradient zero; give another factor", vars(self))


KIND = ProductKind(
    name="scaled",
    summary="a learned factor for each output of feed-forward projections",
    products="bidirectional.scaled:products",
    section=Section("scaled", ScaledConfig, "scaled products"),
)
