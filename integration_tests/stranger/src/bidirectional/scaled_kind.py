"""The entry in the group ``megatron.products``; no torch."""

from dataclasses import dataclass, field

from megatron_parallel import LayoutError
from megatron_parallel.extensions import Section
from megatron_parallel.tensor_parallel import ProductKind


@dataclass(frozen=True)
class ScaledConfig:
    """Settings of the product."""

    start: float = field(
        default=1.0,
        metadata={"flag": "--scaled-start", "help": "factor of each output at the beginning"},
    )

    def __post_init__(self) -> None:
        if self.start == 0:
            raise LayoutError("{start} stops every gradient; give another factor", vars(self))


KIND = ProductKind(
    name="scaled",
    summary="a learned factor for each output of a feed-forward layer's projections",
    products="bidirectional.scaled:products",
    section=Section("scaled", ScaledConfig, "scaled products"),
)
