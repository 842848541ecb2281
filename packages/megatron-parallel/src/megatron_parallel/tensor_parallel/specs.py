"""Parallel layers as plain data, without torch: their sizes and the sharding of their parameters.

Layers are built from these specs (`ColumnParallelLinear.from_spec`), and parameters are counted
from them, so each shape is defined once.
"""

from dataclasses import dataclass
from typing import Any

from megatron_parallel.sharding.sharding import DEFAULT_INIT, ZEROS, Init, Sharding


@dataclass(frozen=True)
class ColumnSpec:
    """A linear layer whose outputs are cut, weight `(*out_features, in_features)`.

    Attributes:
        in_features: Size of the last dim of the input.
        out_features: Shape of the output.
        bias: Whether the layer has a bias, of shape `out_features`.
        dim: Dim of `out_features` that is cut.
        fused_dim: Dim of `out_features` that enumerates fused weights.
        spill_dim: Dim of `out_features` that is also cut if there are more ranks than entries.
        padded: Size of the cut dim in memory if it is a padded vocabulary.
        axis: Name of the axis.
        init: Initial values of the weight. The bias starts at zero.
        role: Name of the layer in Megatron-Core, such as `linear_qkv`, by which products are
            chosen.
        fused_sizes: Sizes of the weights that the last dim of `out_features` concatenates
            (`Sharding.fused_sizes`).
    """

    in_features: int
    out_features: tuple[int, ...]
    bias: bool = True
    dim: int = 0
    fused_dim: int | None = None
    spill_dim: int | None = None
    padded: int | None = None
    axis: str = "tp"
    init: Init = DEFAULT_INIT
    role: str = ""
    fused_sizes: tuple[int, ...] = ()

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of the layer."""
        return {name: value for name, value in vars(self).items() if name != "role"}

    def shardings(self, sequence_parallel: bool = False) -> dict[str, Sharding]:
        """Returns the shardings of weight and bias, with or without sequence parallelism."""
        del sequence_parallel
        out, cut = self.out_features, (self.axis, self.dim, self.padded, self.fused_dim)
        spill = self.spill_dim
        found = {
            "weight": Sharding(
                (*out, self.in_features),
                *cut,
                init=self.init,
                spill_dim=spill,
                vocabulary=self.padded is not None,
                fused_sizes=self.fused_sizes,
            )
        }
        if self.bias:
            found["bias"] = Sharding(
                out, *cut, weight_decay=False, init=ZEROS, spill_dim=spill, vector=True
            )
        return found


@dataclass(frozen=True)
class RowSpec:
    """A linear layer whose inputs are cut, weight `(out_features, in_features)`.

    The bias is added once, after the sum. With sequence parallelism, each rank adds it to its own
    positions and has a part of its gradient. `role` is as for `ColumnSpec`.
    """

    in_features: int
    out_features: int
    bias: bool = True
    axis: str = "tp"
    init: Init = DEFAULT_INIT
    role: str = ""

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of the layer."""
        return {name: value for name, value in vars(self).items() if name != "role"}

    def shardings(self, sequence_parallel: bool = False) -> dict[str, Sharding]:
        """Returns the shardings of weight and bias."""
        shape = (self.out_features, self.in_features)
        found = {"weight": Sharding(shape, self.axis, 1, init=self.init)}
        if self.bias:
            found["bias"] = Sharding(
                (self.out_features,),
                weight_decay=False,
                init=ZEROS,
                partial=self.axis if sequence_parallel else None,
            )
        return found


@dataclass(frozen=True)
class ReplicatedSpec:
    """A linear layer that every rank of an axis holds, weight `(out_features, in_features)`.

    With sequence parallelism, each rank computes its own positions and has a part of the gradient
    of weight and bias. `role` is as for `ColumnSpec`.
    """

    in_features: int
    out_features: int
    bias: bool = True
    axis: str = "tp"
    init: Init = DEFAULT_INIT
    role: str = ""

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of the layer."""
        return {name: value for name, value in vars(self).items() if name != "role"}

    def shardings(self, sequence_parallel: bool = False) -> dict[str, Sharding]:
        """Returns the shardings of weight and bias."""
        partial = self.axis if sequence_parallel else None
        shape = (self.out_features, self.in_features)
        found = {"weight": Sharding(shape, init=self.init, partial=partial)}
        if self.bias:
            found["bias"] = Sharding(shape[:1], weight_decay=False, init=ZEROS, partial=partial)
        return found


@dataclass(frozen=True)
class VocabSpec:
    """Token embeddings `(num_embeddings, embedding_dim)` with the vocabulary cut.

    `padded` is the size of the vocabulary in memory.
    """

    num_embeddings: int
    embedding_dim: int
    padded: int | None = None
    axis: str = "tp"
    init: Init = DEFAULT_INIT

    def shardings(self, sequence_parallel: bool = False) -> dict[str, Sharding]:
        """Returns the sharding of the weight, with or without sequence parallelism."""
        del sequence_parallel
        shape = (self.num_embeddings, self.embedding_dim)
        cut = (self.axis, 0, self.padded)
        return {"weight": Sharding(shape, *cut, init=self.init, vocabulary=True)}
