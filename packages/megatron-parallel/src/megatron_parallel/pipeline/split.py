"""Splits the layers of a model into pipeline stages, in pure Python.

A pipeline of `pp` ranks with `vpp` chunks each has `pp * vpp` stages. Stage `i` is chunk `i // pp`
of rank `i % pp`, so a micro-batch visits every rank `vpp` times (Narayanan et al. 2021, section
2.2). Layers keep their global indices.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.coordinates import stages_of
from megatron_parallel.nearest import nearest, nearest_multiples


def split_layers(
    num_layers: int,
    pp: int,
    vpp: int = 1,
    *,
    first: int | None = None,
    last: int | None = None,
    count_embedding: bool = False,
    count_loss: bool = False,
) -> tuple[range, ...]:
    """Returns the global layer indices of every stage, in the order of the model.

    By default all stages have the same number of layers. `first` and `last`, or `count_embedding`
    and `count_loss`, make uneven ones.

    Args:
        num_layers: Number of layers of the model.
        pp: Number of pipeline ranks.
        vpp: Number of chunks per rank.
        first: Number of layers on the first rank, over all its chunks. The other ranks share the
            rest.
        last: Number of layers on the last rank, over all its chunks.
        count_embedding: Whether the embedding counts as a layer of the first stage.
        count_loss: Whether output layer and loss count as a layer of the last stage.

    Raises:
        LayoutError: The numbers do not divide; the error names them. No layer is ever dropped.
    """
    if num_layers < 1 or pp < 1 or vpp < 1:
        raise LayoutError(f"{num_layers} layers over pp={pp}, vpp={vpp}: all must be at least 1")
    if first is None and last is None:
        sizes = _even(num_layers, pp, vpp, count_embedding, count_loss)
    elif count_embedding or count_loss:
        raise LayoutError(
            f"sizes of the first and last rank (first={first}, last={last}) exclude counting "
            "embedding or loss as a layer: use one of them"
        )
    else:
        sizes = _with_given_ends(num_layers, pp, vpp, first, last)
    ends = accumulate(sizes, initial=0)
    return tuple(range(start, stop) for start, stop in pairwise(ends))


def chunk_layers(split: Sequence[range], pp: int, rank: int) -> tuple[range, ...]:
    """Returns the layers of each chunk of one pipeline rank: every `pp`-th stage of `split`."""
    return tuple(split[stage] for stage in stages_of("loop", pp, len(split) // pp, rank))


def _even(num_layers: int, pp: int, vpp: int, embedding: bool, loss: bool) -> list[int]:
    stages, total = pp * vpp, num_layers + embedding + loss
    if total % stages:
        counted = [
            name for name, is_counted in (("embedding", embedding), ("loss", loss)) if is_counted
        ]
        extra = "".join(f" + {name}" for name in counted)
        below = total // stages * stages - len(counted)
        nearest = " or ".join(str(n) for n in (below, below + stages) if n > 0)
        layers = "1 layer" if num_layers == 1 else f"{num_layers} layers"
        raise LayoutError(
            f"{layers}{extra} cannot be split evenly over {_product(pp, vpp)}: "
            f"use {nearest} layers or another number of stages, or uneven ones: {{first:name}}, "
            "{last:name}, {count_embedding:name}, {count_loss:name}",
            dict.fromkeys(("first", "last", "count_embedding", "count_loss")),
        )
    sizes = [total // stages] * stages
    sizes[0] -= embedding
    sizes[-1] -= loss
    return sizes


def _with_given_ends(
    num_layers: int, pp: int, vpp: int, first: int | None, last: int | None
) -> list[int]:
    given = {"first": first, "last": last}
    named = {name: size for name, size in given.items() if size is not None}
    requested = ", ".join(f"{name}={size}" for name, size in named.items())
    for name, size in named.items():
        if size < 0 or size % vpp:
            raise LayoutError(
                f"{name}={size} layers cannot be split over vpp={vpp} chunks: use "
                f"{nearest_multiples(size, vpp)}"
            )
    between, rest = pp - len(named), num_layers - sum(named.values())
    if between < 0:
        raise LayoutError(f"{requested}: pp={pp} has one rank, both first and last; leave them out")
    stages = between * vpp
    if rest < 0 or (rest > 0 if stages == 0 else rest % stages or rest == 0):
        given_layers, count = num_layers - rest, max(rest // (stages or 1), 0)
        valid = [given_layers + stages * each for each in (count, count + 1) if each or not stages]
        raise LayoutError(
            f"{num_layers} layers with {requested} leave {rest} for the other {between} ranks of "
            f"the pipeline ({between} x vpp {vpp} = {stages} stages), which is not a positive "
            f"multiple of {stages}: use {nearest(valid, num_layers)} layers or other sizes"
            if stages
            else f"{num_layers} layers are not {requested}: pp={pp} has no other stage; use "
            f"{nearest(valid, num_layers)} layers or other sizes"
        )
    inner = rest // stages if stages else 0
    per_rank = [inner] * pp
    if first is not None:
        per_rank[0] = first // vpp
    if last is not None:
        per_rank[-1] = last // vpp
    return per_rank * vpp


def _product(pp: int, vpp: int) -> str:
    return f"{pp} stages" if vpp == 1 else f"{pp} ranks x {vpp} chunks = {pp * vpp} stages"
