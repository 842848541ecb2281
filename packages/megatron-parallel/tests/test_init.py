"""Initial values: equal for every layout, determined by seed and name, and fixed."""

from hashlib import blake2b
from typing import Any

import pytest
import torch
from megatron_parallel import (
    Mesh,
    ParallelLayout,
    Sharding,
    collect_shardings,
    initialize_parameters,
)
from megatron_parallel.sharding import ONES, Init, initialize, normal_, scaled_std, uniform_
from torch import nn

FIRST_THREE = [-0.02690511, -0.00411337, 0.00698019]

SHARDINGS = {
    "first dim": Sharding((24, 70), "tp", 0),
    "second dim": Sharding((70, 24), "tp", 1),
    "padded": Sharding((1000, 200), "tp", 0, padded=1024),
    "fused": Sharding((2, 1200, 60), "tp", 1, fused_dim=0),
    "many blocks": Sharding((120, 4099), "tp", 0),
    "many blocks, second dim": Sharding((4099, 120), "tp", 1),
    "long rows": Sharding((12, 70001), "tp", 0),
    "not cut": Sharding((300, 301)),
    "vector": Sharding((24,), "tp", 0),
    "scalar": Sharding(()),
}


def drawn(sharding: Sharding, mesh: Mesh, name: str = "w", **options: object) -> torch.Tensor:
    dtype = options.pop("dtype", torch.float32)
    param = torch.full(sharding.local_shape(mesh), torch.nan, dtype=dtype)  # type: ignore[arg-type]
    settings = {"seed": 11, "std": 0.5} | options
    normal_(param, name=name, sharding=sharding, mesh=mesh, **settings)  # type: ignore[arg-type]
    return param


@pytest.mark.parametrize("kind", SHARDINGS)
def test_parts_are_slices_of_what_one_rank_draws(
    kind: str, tensor_ranks: list[Mesh], single: Mesh
) -> None:
    sharding = SHARDINGS[kind]
    whole = drawn(sharding, single)
    for mesh in tensor_ranks:
        part = drawn(sharding, mesh)
        held = torch.zeros_like(part)
        for box, local in sharding.shard_boxes(mesh):
            held[local.slices] = whole[box.slices]
        assert torch.equal(part, held)  # with padding, which is zero


def test_padding_is_zero_for_every_padded_size(single: Mesh) -> None:
    plain = drawn(Sharding((100, 40), "tp", 0), single)
    padded = drawn(Sharding((100, 40), "tp", 0, padded=128), single)
    assert torch.equal(padded[:100], plain) and not padded[100:].any()


def test_other_dtypes_have_the_float32_values(single: Mesh) -> None:
    sharding = Sharding((50, 2000), "tp", 1)
    single_precision = drawn(sharding, single)
    for dtype in (torch.float64, torch.bfloat16):
        assert torch.equal(drawn(sharding, single, dtype=dtype), single_precision.to(dtype))


def test_seed_name_and_expert_each_change_the_draw(single: Mesh) -> None:
    sharding = Sharding((64, 64))
    draws = [
        drawn(sharding, single),
        drawn(sharding, single, "w2"),
        drawn(sharding, single, seed=12),
        drawn(sharding, single, expert=0),
        drawn(sharding, single, expert=1),
    ]
    assert len({tuple(draw.flatten()[:4].tolist()) for draw in draws}) == len(draws)
    assert torch.equal(drawn(sharding, single), draws[0])


def test_experts_have_the_initial_values_of_single_experts_on_every_expert_grid(
    single: Mesh,
) -> None:
    alone = Sharding((2, 300, 150), "expert_tp", 1, fused_dim=0)
    together = Sharding((4, 2, 300, 150), "expert_tp", 2, fused_dim=1, experts=True)
    whole = drawn(together, single)
    for expert in range(4):
        assert torch.equal(whole[expert], drawn(alone, single, expert=expert))
    for degrees in ({"ep": 2}, {"ep": 4, "tp": 2, "etp": 1}, {"ep": 2, "tp": 2, "etp": 2}):
        layout = ParallelLayout(**degrees).resolve(8)
        held = torch.zeros_like(whole)
        for mesh in (Mesh(layout, rank) for rank in range(8)):
            (piece,) = together.shard_boxes(mesh)
            part = drawn(together, mesh)
            assert torch.equal(part, whole[piece.box.slices])
            held[piece.box.slices] = part
        assert torch.equal(held, whole)


def test_blocks_differ_and_have_the_requested_distribution(single: Mesh) -> None:
    wide = drawn(Sharding((2048, 512)), single, std=0.02)
    assert wide.mean().abs() < 1e-4 and abs(wide.std().item() / 0.02 - 1) < 0.01
    assert len(wide[:, 0].unique()) > 2000
    flat = torch.empty(512, 512)
    uniform_(flat, seed=1, name="u", sharding=Sharding((512, 512)), bound=0.1, mesh=single)
    assert flat.abs().max() <= 0.1 and abs(flat.std().item() / (0.1 / 3**0.5) - 1) < 0.01


@pytest.mark.parametrize(
    ("init", "undo", "shape"),
    [
        (Init("log_uniform", 16.0, 1.0), torch.exp, lambda x: (x - 1) / 15),
        (
            Init("inverse_softplus", 0.1, 0.001),
            nn.functional.softplus,
            lambda x: 1 + torch.log10(x / 0.1) / 2,
        ),
    ],
    ids=["logarithm", "inverse softplus"],
)
def test_decays_and_steps_are_distributed_within_their_bounds(
    init: Init, undo: Any, shape: Any, single: Mesh
) -> None:
    values = torch.empty(64, 512)
    initialize(values, seed=1, name="a", sharding=Sharding((64, 512)), mesh=single, init=init)
    found = undo(values)
    assert init.low * 0.999 <= found.min() and found.max() <= init.scale * 1.001
    uniform = shape(found).flatten().sort().values
    assert (uniform - torch.linspace(0, 1, len(uniform))).abs().max() < 0.02


def test_the_format_is_pinned(single: Mesh) -> None:
    """Changing hash, key or block size changes every training curve."""
    sharding = Sharding((1000, 100), "tp", 0)  # 655 rows per block
    whole = drawn(sharding, single, "layers.3.mlp.up.weight", std=0.02)
    for block, rows in enumerate((655, 345)):
        key = f"11/layers.3.mlp.up.weight/{block}".encode()
        seed = int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
        generator = torch.Generator().manual_seed(seed)
        expected = torch.empty(rows, 100).normal_(0.0, 0.02, generator=generator)
        assert torch.equal(whole[655 * block : 655 * block + rows], expected)
    assert whole[0, :3].tolist() == pytest.approx(FIRST_THREE, abs=1e-7)


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [((65537,), (65536, 1)), ((3, 70001), (1, 1, 1)), ((2, 32769), (1, 1)), ((2, 32768), (2,))],
    ids=str,
)
def test_a_block_has_65536_elements_or_one_row(
    shape: tuple[int, ...], blocks: tuple[int, ...], single: Mesh
) -> None:
    whole = drawn(Sharding(shape), single, std=1.0)
    for block, part in enumerate(whole.split(blocks)):
        key = blake2b(f"11/w/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
        assert torch.equal(part, torch.empty_like(part).normal_(generator=generator))


def test_a_scalar_is_a_block_of_one_number(single: Mesh) -> None:
    key = blake2b(b"11/w/0", digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
    expected = torch.empty(()).normal_(generator=generator)
    assert torch.equal(drawn(Sharding(()), single, std=1.0), expected)


def test_parameters_are_filled_by_their_global_names(single: Mesh) -> None:
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((8, 8), torch.nan))
            self.gain = nn.Parameter(torch.full((8,), torch.nan))
            init = Init("normal", 0.1)
            self.sharding = {
                "weight": Sharding((8, 8), init=init),
                "gain": Sharding((8,), init=ONES),
            }

    model = nn.ModuleDict({"0": Owner(), "1": Owner()})
    initialize_parameters(model, seed=5, mesh=single)
    expected = torch.empty(8, 8)
    table = collect_shardings(model)
    initialize(expected, seed=5, name="1.weight", sharding=table["1.weight"], mesh=single)
    assert torch.equal(model["1"].weight, expected) and (model["1"].gain == 1).all()
    assert not torch.equal(model["0"].weight, expected)


def test_scaled_std() -> None:
    assert scaled_std(0.02, 8) == pytest.approx(0.005)
