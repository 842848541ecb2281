"""Initial values that are the same for every layout.

A parameter is drawn in blocks along the dim that its sharding cuts (else the first dim). Each block
has a CPU generator of its own, seeded by a hash of the seed, the global name, the block index and,
for experts, the index of the expert. A rank draws only the blocks that overlap its part, so 1 rank
and 64 ranks start from the same numbers, and no rank holds a whole weight.

Numbers are drawn in float32 and then cast: a float64 parameter has exactly the float32 values, and
a bfloat16 parameter has these values rounded. Padding is zero.

The block size and the hash are part of the format: changing them changes every training curve.
(torch seeds its CPU generator with 32 bits, so in a model of `n` blocks about `n^2 / 2^33` pairs of
blocks are equal: none are expected below ten billion parameters, and a few hundred of 1.5 million
blocks at a hundred billion.)
"""

import math
from collections.abc import Iterator
from hashlib import blake2b
from math import prod

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from megatron_parallel._compat.imagined import has_no_values
from megatron_parallel.mesh.mesh import Mesh
from megatron_parallel.sharding.sharding import Box, Init, Sharding
from megatron_parallel.sharding.step_state import collect_states
from megatron_parallel.sharding.views import collect_shardings

BLOCK_NUMEL = 65536
"""Maximum number of elements in a block, unless one row is longer. Part of the format."""


def initialize_parameters(module: nn.Module, *, seed: int, mesh: Mesh) -> None:
    """Fills all parameters of `module` with the initial values of their shardings.

    State that is not a parameter is reset to its constant. Layers are built without values (NaN).
    On the meta device and on an imagined device (`megatron_parallel.imagined`) they remain so.

    Args:
        module: Module whose parameters have shardings.
        seed: Seed of the run.
        mesh: Mesh of this rank.
    """
    if any(has_no_values(parameter) for parameter in module.parameters()):
        return
    table = collect_shardings(module)
    for name, parameter in module.named_parameters():
        initialize(parameter, seed=seed, name=name, sharding=table[name], mesh=mesh)
    for name, state in collect_states([module]).items():
        initialize(state.value, seed=seed, name=name, sharding=table[name], mesh=mesh)


def initialize(
    param: Float[Tensor, "..."],
    *,
    seed: int,
    name: str,
    sharding: Sharding,
    mesh: Mesh,
    init: Init | None = None,
    expert: int | None = None,
) -> None:
    """Fills the local part of one parameter in place.

    Args:
        param: Local part of the parameter.
        seed: Seed of the run.
        name: Global name of the parameter.
        sharding: Sharding of the parameter.
        mesh: Mesh of this rank.
        init: Initial values. Defaults to those of the sharding.
        expert: Index of the expert, for a parameter of a single expert. A parameter of all experts
            (`Sharding.experts`) gets the same values for each expert.
    """
    init = init or sharding.init
    with torch.no_grad():
        if init.kind == "constant":
            param.zero_()
            for piece in sharding.shard_boxes(mesh):
                param[piece.local.slices] = init.scale
        elif sharding.experts:
            for number, one in zip(sharding.expert_indices(mesh), param, strict=True):
                _draw(one, init, (seed, name, number), sharding.single_expert, mesh)
        else:
            _draw(param, init, (seed, name, expert), sharding, mesh)


def normal_(
    param: Float[Tensor, "..."],
    *,
    seed: int,
    name: str,
    sharding: Sharding,
    std: float,
    mesh: Mesh,
    expert: int | None = None,
) -> None:
    """Fills the local part of parameter `name` from a normal distribution with mean 0, in place."""
    spec = Init("normal", std)
    initialize(param, seed=seed, name=name, sharding=sharding, mesh=mesh, init=spec, expert=expert)


def uniform_(
    param: Float[Tensor, "..."],
    *,
    seed: int,
    name: str,
    sharding: Sharding,
    bound: float,
    mesh: Mesh,
    expert: int | None = None,
) -> None:
    """Fills the local part of parameter `name` uniformly from `[-bound, bound)`, in place."""
    spec = Init("uniform", bound)
    initialize(param, seed=seed, name=name, sharding=sharding, mesh=mesh, init=spec, expert=expert)


def scaled_std(std: float, num_layers: int) -> float:
    """Returns `std / sqrt(2 L)`, the standard deviation of projections to the residual stream.

    Each of the `L` layers adds to the residual stream twice (Radford et al. 2019, section 2.3).
    """
    return std / math.sqrt(2.0 * num_layers)


def _draw(
    param: Tensor,
    init: Init,
    key: tuple[int, str, int | None],
    sharding: Sharding,
    mesh: Mesh,
) -> None:
    pieces = sharding.shard_boxes(mesh)
    if sum(piece.box.numel for piece in pieces) < param.numel():
        param.zero_()
    generator = Generator(device="cpu")
    for box, local in pieces:
        for number, block in _blocks(sharding, box):
            generator.manual_seed(_block_seed(*key, number))
            values = _values(init, block.lengths, generator)
            overlap = block.intersection(box)
            source = overlap.shifted(tuple(-offset for offset in block.offsets))
            moves = zip(local.offsets, box.offsets, strict=True)
            target = overlap.shifted(tuple(mine - ours for mine, ours in moves))
            param[target.slices].copy_(values[source.slices])


def _values(init: Init, shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Returns the initial values of one block."""
    values = torch.empty(shape, dtype=torch.float32)
    if init.kind == "normal":
        return values.normal_(0.0, init.scale, generator=generator)
    if init.kind == "log_uniform":
        return values.uniform_(init.low, init.scale, generator=generator).log_()
    if init.kind == "inverse_softplus":
        low, high = math.log(init.low), math.log(init.scale)
        steps = values.uniform_(low, high, generator=generator).exp_()
        return steps + torch.log(-torch.expm1(-steps))
    return values.uniform_(-init.scale, init.scale, generator=generator)


def _blocks(sharding: Sharding, box: Box) -> Iterator[tuple[int, Box]]:
    """Yields index and box of each block that overlaps a box of elements; a scalar is one block."""
    shape = sharding.shape
    if not shape:
        yield 0, Box((), ())
        return
    dim = sharding.block_dim
    rows = max(1, BLOCK_NUMEL // (prod(shape) // shape[dim]))
    start, stop = box.offsets[dim], box.offsets[dim] + box.lengths[dim]
    for number in range(start // rows, -(-stop // rows)):
        first = number * rows
        offsets = tuple(first if d == dim else 0 for d in range(len(shape)))
        length = min(rows, shape[dim] - first)
        yield number, Box(offsets, tuple(length if d == dim else n for d, n in enumerate(shape)))


def _block_seed(seed: int, name: str, expert: int | None, block: int) -> int:
    key = f"{seed}/{name}/{block}" + ("" if expert is None else f"/{expert}")
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")
