"""Fully sharded data parallelism against torch, with both ranks played by one process.

The ranks take turns. Each gets from a collective what the other one sent in its turn before, so
that the third turn has all values.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron_parallel import (
    DataParallelConfig,
    LayoutError,
    Mesh,
    ParallelLayout,
    Sharding,
    _compat,
)
from megatron_parallel._compat import fully_sharded as torchs
from megatron_parallel.collectives.traffic import Traffic
from megatron_parallel.data_parallel.fully_sharded import FullySharded
from megatron_parallel.sharding import Box
from torch import Tensor, nn

FSDP = DataParallelConfig(use_torch_fsdp2=True)
KEEPING = replace(FSDP, torch_fsdp2_no_reshard_after_forward=True)
DP2 = ParallelLayout(dp=2)


class Net(nn.Module):
    """A block, an output layer with an odd number of rows, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.gain = nn.Parameter(torch.ones(1))  # for one rank alone
        self.unused = nn.Parameter(torch.ones(2))
        self.block, self.head = nn.Linear(4, 6, bias=False), nn.Linear(6, 3)
        self.double()
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.copy_(draw)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.head(torch.tanh(self.block(x * self.frozen)))


TABLE = {name: Sharding(tuple(p.shape)) for name, p in Net().named_parameters()}
BOXES = {  # of both ranks: as `torch.chunk` cuts the first dim
    "gain": (Box((0,), (1,)), Box((1,), (0,))),
    "unused": (Box((0,), (1,)), Box((1,), (1,))),
    "block.weight": (Box((0, 0), (3, 4)), Box((3, 0), (3, 4))),
    "head.weight": (Box((0, 0), (2, 6)), Box((2, 0), (1, 6))),
    "head.bias": (Box((0,), (2,)), Box((2,), (1,))),
}


def data(index: int) -> Tensor:
    """Returns two micro-batches of a data-parallel rank."""
    generator = torch.Generator().manual_seed(10 + index)
    return torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)


Sent = dict[str, list[Tensor]]


class Turn(NamedTuple):
    sent: Sent
    shards: dict[str, Tensor]
    gradients: dict[str, Tensor]
    records: list[tuple[Any, ...]]
    sharded: FullySharded


@contextmanager
def collectives(index: int, others: Sent, sent: Sent) -> Iterator[None]:
    """Replaces collectives of torch; where the other rank has sent nothing, it sends the same."""

    def of_other(name: str, own: Tensor) -> list[Tensor]:
        number = len(sent[name])
        sent[name].append(own)
        other = others[name][number] if number < len(others[name]) else own
        return [own, other] if index == 0 else [other, own]

    def gather(whole: Tensor, part: Tensor, **_: Any) -> None:
        whole.copy_(torch.cat(of_other("all_gather", part.clone())))

    def scatter(part: Tensor, whole: Tensor, op: Any, **_: Any) -> None:
        assert op == dist.ReduceOp.SUM
        both = torch.stack(of_other("reduce_scatter", whole.clone()))
        part.copy_(both.sum(0).view(2, -1)[index])

    with patch.multiple(torchs, _all_gather=gather, _reduce_scatter=scatter):
        yield


def turn(
    layout: ParallelLayout,
    rank: int,
    others: Sent,
    config: DataParallelConfig = FSDP,
    table: dict[str, Sharding] = TABLE,
) -> Turn:
    """Runs a step of two micro-batches on one rank."""
    net, traffic = Net(), Traffic()
    with Mesh.imagined(layout, rank) as mesh:
        index = mesh.axis("dp").index
        sent: Sent = {"all_gather": [], "reduce_scatter": []}
        with collectives(index, others, sent):
            sharded = FullySharded(net, [net.block], table, mesh, config)
            mesh.axis("dp").ledger.open.append(traffic)
            for number, x in enumerate(data(index)):
                sharded.begin(last=number == 1)
                sharded.module(x).square().sum().backward()
            with pytest.raises(LayoutError, match=r"not summed yet: call finish\(\) first"):
                sharded.gradients()
            sharded.finish()
        shards = {name: box.clone() for name, box in sharded.local_shards().items()}
        gradients = {name: g.clone() for name, g in sharded.gradients().items()}
    return Turn(sent, shards, gradients, list(map(tuple, traffic.records)), sharded)


NOTHING: Sent = {"all_gather": [], "reduce_scatter": []}


def truth() -> dict[str, Tensor]:
    net = Net()
    for index in range(2):
        net(data(index)).square().sum().backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in net.named_parameters()}


def test_boxes_and_summed_gradients_are_those_of_torch() -> None:
    turns = [NOTHING, NOTHING]
    for _ in range(3):
        ranks = [turn(DP2, rank, turns[1 - rank]) for rank in range(2)]
        turns = [rank.sent for rank in ranks]
    gradients, whole = truth(), dict(Net().named_parameters())
    for rank, found in enumerate(ranks):
        held = {name: own[rank] for name, own in BOXES.items() if own[rank].numel}
        assert found.shards.keys() == found.gradients.keys() == held.keys()
        for name, box in held.items():
            assert torch.equal(found.shards[name], whole[name][box.slices])
            torch.testing.assert_close(found.gradients[name], gradients[name][box.slices])
        # A unit is gathered for both passes; of the rest, 18 numbers with padding, for one.
        assert found.records == [
            ("dp", "all_gather of parameters", 6, 8 * (4 * 12 + 2 * 18)),
            ("dp", "reduce_scatter of gradients", 2, 8 * (24 + 2 * 15)),
        ]
        assert found.sharded.reductions() == []
    kept = turn(DP2, 0, NOTHING, KEEPING).records[0]
    assert kept == ("dp", "all_gather of parameters", 4, 8 * (2 * 12 + 2 * 18))


@pytest.mark.parametrize("rank", [0, 1])
def test_cuts_regions_and_views_are_the_boxes_of_the_rank(rank: int) -> None:
    sharded = turn(DP2, rank, NOTHING).sharded
    cuts = sharded.cuts()
    assert {name: cut.boxes for name, cut in cuts.items()} == BOXES
    assert all((cut.axis.name, cut.shape) == ("dp", TABLE[n].shape) for n, cut in cuts.items())
    regions = {name: region.boxes for name, region in sharded.regions().items()}
    own = {name: boxes[rank] for name, boxes in BOXES.items()}
    assert regions == {name: (box,) if box.numel else () for name, box in own.items()}
    every = sharded.all_local_shards()
    assert every.keys() == TABLE.keys() and every["frozen"].shape == (2,)
    shards = sharded.local_shards()
    for name, (view,) in sharded.views(shards, Mesh(DP2, rank)).items():
        assert (view.offsets, view.lengths, view.replica) == (
            own[name].offsets,
            own[name].lengths,
            0,
        )
        assert view.tensor.data_ptr() == shards[name].data_ptr()


def test_a_step_ends_with_zero() -> None:
    sharded = turn(DP2, 0, NOTHING).sharded
    with pytest.raises(LayoutError, match=r"begin\(\) after finish\(\): call zero\(\)"):
        sharded.begin()
    with pytest.raises(LayoutError, match=r"finish\(\) was called twice"):
        sharded.finish()
    assert sharded.nonfinite_gradients() == []
    for value, is_nan in ((torch.inf, False), (torch.nan, True)):
        sharded.gradients()["head.bias"][1] = value
        assert sharded.nonfinite_gradients() == [("fully sharded", "head.bias", is_nan, None)]
    sharded.zero()
    sharded.begin()
    sharded.finish()
    assert not any(gradient.any() for gradient in sharded.gradients().values())


class Doubles:
    """An all-reduce over two ranks with equal numbers."""

    def __init__(self, t: Tensor) -> None:
        self.t = t

    def wait(self) -> None:
        self.t.mul_(2)

    def is_completed(self) -> bool:
        return True


def test_partial_gradients_are_summed_over_tensor_ranks_in_one_message() -> None:
    layout = ParallelLayout(tp=2, dp=2)
    partial = {n: replace(TABLE[n], partial="tp") for n in ("gain", "head.bias")}
    with patch.object(_compat, "start_all_reduce", lambda t, group: Doubles(t)):
        plain, summed = (turn(layout, 1, NOTHING, table=t) for t in (TABLE, TABLE | partial))
    assert plain.sharded.reductions() == [] and summed.gradients.keys() == BOXES.keys()
    for name, gradient in summed.gradients.items():
        torch.testing.assert_close(gradient, plain.gradients[name] * (1 + (name in partial)))
    (reduction,) = summed.sharded.reductions()
    assert reduction[:4] == ("tp", "all_reduce of gradients", ("gain", "head.bias"), 3 * 8)
    summed.sharded.zero()
    assert summed.sharded.reductions() == []
    assert turn(DP2, 1, NOTHING, table=TABLE | partial).sharded.reductions() == []


class Pair(NamedTuple):
    first: Tensor
    number: float


class Views(nn.Linear):
    """A layer that returns views of its result, in the form of its last argument."""

    def forward(self, x: Tensor, form: Any) -> Any:  # type: ignore[override]
        y = super().forward(x)
        return form(y[:1])


def test_outputs_that_are_views_get_memory_of_their_own() -> None:
    forms = (lambda y: y, lambda y: (y, y), lambda y: Pair(y, 3.0))
    with Mesh.imagined(DP2, 0) as mesh, collectives(0, NOTHING, {"all_gather": []}):
        layer = Views(2, 4)
        table = {name: Sharding(tuple(p.shape)) for name, p in layer.named_parameters()}
        module = FullySharded(layer, [], table, mesh).module
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*view")
            one, several, pair = (module(torch.ones(3, 2), form) for form in forms)
    assert not any(t._is_view() for t in (one, *several, pair.first))
    assert type(several) is tuple and type(pair) is Pair and pair.number == 3.0
    assert torch.equal(one, several[1]) and torch.equal(one, pair.first)


# -- what torch is asked for -----------------------------------------------------------------------


class StoppedError(Exception):
    """Raised in place of sharding."""


def with_groups(layout: ParallelLayout, rank: int) -> tuple[Mesh, dict[tuple[int, ...], Any]]:
    resolved = layout.resolve(layout.world_size)
    every = {g: object() for name in resolved.group_names for g in resolved.groups(name)}
    return Mesh(resolved, rank, groups=every), every  # type: ignore[arg-type]


def asked(
    mesh: Mesh,
    module: nn.Module,
    units: Sequence[nn.Module] = (),
    table: dict[str, Sharding] | None = None,
    config: DataParallelConfig = FSDP,
) -> SimpleNamespace:
    """Returns the arguments with which torch would shard a module."""
    found = SimpleNamespace()

    def shard(module: nn.Module, units: Any, ranks: Any, **options: Any) -> None:
        vars(found).update(options, units=units, ranks=ranks)
        raise StoppedError

    plain = {name: Sharding(tuple(p.shape)) for name, p in module.named_parameters()}
    with patch.object(_compat, "fully_shard", shard), pytest.raises(StoppedError):
        FullySharded(module, units, plain | (table or {}), mesh, config)
    return found


@pytest.mark.parametrize(
    ("layout", "inner", "outer", "grid", "axis"),
    [
        (ParallelLayout(dp=2, tp=2), (1, 3), None, [[1, 3]], "dp"),
        (ParallelLayout(dp=4, dp_outer=2), (0, 1), (1, 3), [[0, 1], [2, 3]], "dp_cp_inner"),
        (ParallelLayout(dp=2, cp=2), (0, 1, 2, 3), None, [[0, 1, 2, 3]], "dp_cp"),
    ],
    ids=str,
)
def test_parameters_are_sharded_over_the_ranks_of_an_instance(
    layout: ParallelLayout, inner: Any, outer: Any, grid: list[list[int]], axis: str
) -> None:
    mesh, groups = with_groups(layout, 1)
    block = nn.Linear(4, 4)
    found = asked(mesh, nn.Sequential(block, nn.Linear(4, 4)), [block])
    ((unit, ranks),) = found.units
    assert unit is block and ranks == found.ranks and list(found.ignored) == []
    assert (ranks.inner, ranks.outer, ranks.grid) == (
        groups[inner],
        None if outer is None else groups[outer],
        grid,
    )
    traffic = Traffic()
    mesh.axis(axis).ledger.open.append(traffic)
    t = torch.ones(3)
    for operation in ("all_gather", "reduce_scatter"):
        ranks.on_start(operation, t)
    what = ["all_gather of parameters", "reduce_scatter of gradients"]
    assert traffic.records == [(axis, each, 1, 12) for each in what]
    named = ranks.name_failures("all_gather", t)
    assert (named.description, named.axis_name) == (f"{what[0]} [3] float32", axis)
    assert found.device == "cpu" and found.keep_gathered is False
    assert asked(mesh, block, config=KEEPING).keep_gathered is True


def test_sums_are_in_the_main_dtype_of_parameters_in_16_bits() -> None:
    mesh, _ = with_groups(DP2, 0)
    single, half = nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()
    assert asked(mesh, single).reduce_dtype is None
    assert asked(mesh, nn.Sequential(single, half)).reduce_dtype == torch.float32
    narrow = replace(FSDP, accumulate_allreduce_grads_in_fp32=False)
    assert asked(mesh, half, config=narrow).reduce_dtype is None


class Experts(nn.Module):
    """Two matrices of the experts of a rank."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.ones(count, *s)) for s in ((6, 4), (4, 6)))


def of_experts(dp: int) -> tuple[SimpleNamespace, nn.ModuleDict, dict[tuple[int, ...], Any]]:
    """Returns how the half of four experts is sharded that a rank of two has."""
    mesh, groups = with_groups(ParallelLayout(dp=dp, ep=2), 1)
    layer = nn.ModuleDict({"router": nn.Linear(4, 4), "experts": Experts(2)})
    model = nn.ModuleDict({"layer": layer, "norm": nn.Linear(4, 4), "none": nn.Identity()})
    table = {
        f"layer.experts.{name}": Sharding((4, *shape), experts=True)
        for name, shape in (("up", (6, 4)), ("down", (4, 6)))
    }
    return asked(mesh, model, [layer], table), model, groups


def test_experts_are_sharded_over_the_ranks_that_hold_the_same_ones() -> None:
    found, model, groups = of_experts(4)
    (experts, over), (layer, dense) = found.units
    assert experts is model["layer"]["experts"] and layer is model["layer"]
    assert (over.inner, over.outer, over.grid) == (groups[1, 3], None, [[1, 3]])
    assert dense == found.ranks and dense.inner is groups[0, 1, 2, 3]
    # Never the dim that enumerates experts.
    assert {found.dim_of(p) for p in experts.parameters()} == {1}
    assert {found.dim_of(p) for p in model["norm"].parameters()} == {0}
    assert list(found.ignored) == []


def test_experts_of_one_rank_are_left_to_it() -> None:
    found, model, _ = of_experts(2)
    ((layer, _),) = found.units
    assert layer is model["layer"]
    assert set(found.ignored) == set(model["layer"]["experts"].parameters())


def test_what_cannot_be_sharded_is_refused() -> None:
    layer = nn.Linear(2, 4, bias=False)
    table = {"weight": Sharding((4, 2))}
    for layout in (ParallelLayout(tp=2, dp=1), ParallelLayout(dp=2, dp_outer=2)):
        with pytest.raises(LayoutError, match="at least 2 data parallel ranks in an instance"):
            FullySharded(layer, [], table, Mesh(layout, 0), FSDP)
    mesh, _ = with_groups(DP2, 0)
    with pytest.raises(LayoutError, match="parameter 'weight' is not in the sharding table"):
        FullySharded(layer, [], {}, mesh, FSDP)
    with pytest.raises(LayoutError, match="gradient of 'weight' is partial over axis 'cp'"):
        FullySharded(layer, [], {"weight": Sharding((4, 2), partial="cp")}, mesh, FSDP)
    with (
        patch.object(_compat, "fully_shard", lambda *_, **__: None),
        pytest.raises(LayoutError, match=r"'weight' \(4, 2\) into \(4, 2\), not \(2, 2\): this"),
    ):
        FullySharded(layer, [], table, mesh, FSDP)
