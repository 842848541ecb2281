"""The matrices of a group of parameters: which weights they are, and on which ranks they lie.

A parameter may be several matrices (queries, keys and values; gate and up; experts), cut over
tensor-parallel ranks and, if fully sharded, over data-parallel ranks. `Matrices.map_local` applies
a function of whole matrices and returns this rank's shards of the results, so that an update rule
computes the same in every layout.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Literal, get_args

import torch
from jaxtyping import Float
from megatron_parallel import Mesh, Sharding
from megatron_parallel.sharding import Cut, map_whole, tensor_parallel_cut
from torch import Tensor

TensorParallelMode = Literal["blockwise", "duplicated", "distributed"]
TENSOR_PARALLEL_MODES: tuple[str, ...] = get_args(TensorParallelMode)
PURPOSE = "matrices"
"""Purpose of the messages, as reported in `Traffic`."""

MatrixFunction = Callable[[Float[Tensor, "k rows columns"]], Float[Tensor, "k rows columns"]]


class Matrices:
    """The matrices of a group of parameters.

    Args:
        names: The parameters of the group, equal on all ranks that share them, also those of which
            this rank has an empty shard.
        table: The sharding of every parameter.
        mesh: The mesh of the model.
        cuts: How parameters are cut into boxes over data-parallel ranks; see
            `megatron_parallel.data_parallel.ParameterShards.cuts`.
        dtype: The dtype of main parameters.
        model_dtype: The dtype of the parameters of the model.

    Attributes:
        names: The parameters, sorted.
        local_names: Those of which this rank has a shard that is not empty.
        model_dtype: The dtype of the parameters of the model.
    """

    def __init__(
        self,
        names: Iterable[str],
        table: Mapping[str, Sharding],
        mesh: Mesh,
        cuts: Mapping[str, Cut],
        *,
        dtype: torch.dtype,
        model_dtype: torch.dtype,
    ) -> None:
        self.names = tuple(sorted(names))
        self.model_dtype = model_dtype
        self._dtype, self._device = dtype, mesh.device
        self._table = {name: table[name] for name in self.names}
        self._data_cuts = {name: cuts[name] for name in self.names if name in cuts}
        self.local_names = tuple(
            name
            for name in self.names
            if name not in self._data_cuts or self._data_cuts[name].own.numel
        )
        tensor_cuts = {name: tensor_parallel_cut(table[name], mesh) for name in self.names}
        self._tensor_cuts = {name: cut for name, cut in tensor_cuts.items() if cut is not None}

    def shared_entry(self) -> str | None:
        """Returns a parameter with fused weights whose shard may end inside of one, if any.

        That is the case if tensor-parallel ranks share a group of heads (`Sharding.spill_dim`).
        """
        for name, cut in self._tensor_cuts.items():
            sharding = self._table[name]
            spill = sharding.spill_dim
            if spill is None or not sharding.fused_sizes:
                continue
            if cut.own.lengths[spill] < sharding.shape[spill]:
                return name
        return None

    def map_local(
        self,
        shards: Sequence[Float[Tensor, "..."]],
        function: MatrixFunction,
        *,
        tensor_parallel: TensorParallelMode = "distributed",
        split_fused_sizes: bool = True,
    ) -> list[Float[Tensor, "..."]]:
        """Returns this rank's shards of a function of every matrix.

        All ranks that share parameters call it together. Matrices that are cut over data-parallel
        ranks are assembled on one of them each.

        Args:
            shards: This rank's shards in the order of ``local_names``.
            function: Function of matrices ``[k, rows, columns]`` of equal shape.
            tensor_parallel: ``distributed``: each matrix is assembled on one tensor-parallel rank,
                which calls the function. ``duplicated``: every rank assembles and computes all of
                them. ``blockwise``: the function gets the shard of a tensor-parallel rank, so that
                the result depends on the layout.
            split_fused_sizes: Whether weights that one dim concatenates are separate matrices
                (`Sharding.fused_sizes`).

        Returns:
            Tensors of the shapes of ``shards``, in the dtype of main parameters.
        """

        def of_matrices(names: Sequence[str], wholes: Sequence[Tensor]) -> list[Tensor]:
            return [
                map_matrices(self._table[name], whole, function, split_fused_sizes)
                for name, whole in zip(names, wholes, strict=True)
            ]

        def of_tensor_ranks(names: Sequence[str], parts: Sequence[Tensor]) -> list[Tensor]:
            if tensor_parallel == "blockwise":
                return of_matrices(names, parts)
            everywhere = tensor_parallel == "duplicated"
            return self._assembled(names, parts, self._tensor_cuts, of_matrices, everywhere)

        empty = torch.zeros(0, dtype=self._dtype, device=self._device)
        given = dict(zip(self.local_names, shards, strict=True))
        own = [given[n].to(self._dtype) if n in given else empty for n in self.names]
        results = self._assembled(self.names, own, self._data_cuts, of_tensor_ranks)
        return [r for n, r in zip(self.names, results, strict=True) if n in given]

    def _assembled(
        self,
        names: Sequence[str],
        parts: Sequence[Tensor],
        cuts: Mapping[str, Cut],
        function: Callable[[Sequence[str], Sequence[Tensor]], list[Tensor]],
        everywhere: bool = False,
    ) -> list[Tensor]:
        """Returns this rank's parts of a function of tensors that some axes cut."""
        given = dict(zip(names, parts, strict=True))
        whole = [name for name in names if name not in cuts]
        found = dict(zip(whole, function(whole, [given[n] for n in whole]), strict=True))

        def axis_of(name: str) -> str:
            return cuts[name].axis.name

        for _, group in groupby(sorted(given.keys() & cuts.keys(), key=axis_of), axis_of):
            of_axis = sorted(group)
            results = map_whole(
                [given[name] for name in of_axis],
                [cuts[name] for name in of_axis],
                lambda indices, wholes, of_axis=of_axis: function(  # type: ignore[misc]
                    [of_axis[index] for index in indices], wholes
                ),
                costs=[matrix_cost(self._table[name]) for name in of_axis],
                everywhere=everywhere,
                purpose=PURPOSE,
            )
            found |= dict(zip(of_axis, results, strict=True))
        return [found[name] for name in names]


def map_matrices(
    sharding: Sharding,
    whole: Float[Tensor, "..."],
    function: MatrixFunction,
    split_fused_sizes: bool = True,
) -> Float[Tensor, "..."]:
    """Returns a tensor of the shape of ``whole``, with a function of each of its matrices.

    Experts, and weights that `Sharding.fused_dim` enumerates, are separate matrices. Rows are all
    dims but the last.
    """
    experts = whole if sharding.experts else whole.unsqueeze(0)
    if sharding.fused_dim is None:
        stacked = experts.unsqueeze(1)
    else:
        stacked = experts.movedim(sharding.fused_dim + (not sharding.experts), 1)
    sizes = sharding.fused_sizes if split_fused_sizes else ()
    parts = torch.split(stacked, list(sizes) or stacked.shape[-2], dim=-2)
    results = [
        function(part.flatten(0, 1).flatten(1, -2)).view(part.shape).to(whole.dtype)
        for part in parts
    ]
    result = results[0] if len(results) == 1 else torch.cat(results, dim=-2)
    if sharding.fused_dim is None:
        result = result.squeeze(1)
    else:
        result = result.movedim(1, sharding.fused_dim + (not sharding.experts))
    return result if sharding.experts else result.squeeze(0)


def matrix_cost(sharding: Sharding) -> float:
    """Returns the relative work of a product of a matrix with its transpose."""
    rows, columns = sharding.matrix or (1, 1)
    return float(rows * columns * min(rows, columns))
