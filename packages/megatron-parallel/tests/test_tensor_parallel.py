"""Tensor-parallel layers on several ranks against plain torch on one, in float64."""

from unittest import mock

import pytest
import torch
from megatron_parallel import (
    AbstractMesh,
    ColumnParallelLinear,
    GradientBuffers,
    Mesh,
    ParallelLayout,
    RowParallelLinear,
    VocabParallelEmbedding,
    all_gather,
    collect_shardings,
    initialize_parameters,
    parameter_views,
    vocab_parallel_cross_entropy,
)
from megatron_parallel.data_parallel import fuse_gradient_accumulation
from megatron_parallel.sharding import Init, normal_
from megatron_parallel.tensor_parallel import PLAIN, overlap_forward
from megatron_parallel.tensor_parallel.specs import ColumnSpec
from megatron_parallel.testing import WorkerPool
from torch import nn
from torch.nn import functional

S, B, H, FFN, GROUPS, VOCAB = 12, 2, 8, 24, 12, 37
TP = {n: ParallelLayout(tp=n) for n in (2, 3, 4)}
Tensors = dict[str, torch.Tensor]
Reference = tuple[torch.Tensor, Tensors, Tensors]  # loss, parameters, gradients
Parts = list[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]  # offsets, lengths, part
Outcome = tuple[torch.Tensor, dict[str, Parts], dict[str, Parts]]

NORMAL = Init("normal", 0.5)


class Network(nn.Module):
    """Embedding, fused two-dim column layers, a row layer and tied output, as in a GPT."""

    def __init__(self, mesh: Mesh, sequence_parallel: bool) -> None:
        super().__init__()
        options = {"sequence_parallel": sequence_parallel, "init": NORMAL, "dtype": torch.float64}
        self.axis = mesh.axis("tp")
        self.embedding = VocabParallelEmbedding(VOCAB, H, mesh, padded=48, **options)  # type: ignore[arg-type]
        self.embedding.product = PLAIN
        self.qkv = ColumnParallelLinear(H, (GROUPS, 3), mesh, **options)  # type: ignore[arg-type]
        self.out = RowParallelLinear(GROUPS * 3, H, mesh, **options)  # type: ignore[arg-type]
        self.up = ColumnParallelLinear(H, (2, FFN), mesh, dim=1, fused_dim=0, **options)  # type: ignore[arg-type]
        self.down = RowParallelLinear(FFN, H, mesh, bias=False, **options)  # type: ignore[arg-type]

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.out(torch.tanh(self.qkv(x)).flatten(-2))
        gate, up = self.up(x).unbind(-2)
        x = x + self.down(torch.sigmoid(gate) * up)
        logits = self.embedding.output(x)
        return vocab_parallel_cross_entropy(logits, targets, self.axis, VOCAB)


def plain_loss(
    p: dict[str, torch.Tensor], tokens: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Computes the same network with functions of torch and global tensors."""
    x = functional.embedding(tokens, p["embedding.weight"])
    qkv = functional.linear(x, p["qkv.weight"].reshape(-1, H), p["qkv.bias"].reshape(-1))
    x = x + functional.linear(torch.tanh(qkv), p["out.weight"], p["out.bias"])
    gate = functional.linear(x, p["up.weight"][0], p["up.bias"][0])
    up = functional.linear(x, p["up.weight"][1], p["up.bias"][1])
    x = x + functional.linear(torch.sigmoid(gate) * up, p["down.weight"])
    logits = functional.linear(x, p["embedding.weight"])
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return loss.view_as(targets)


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, VOCAB, (2, S, B), generator=generator)
    return tokens, targets, torch.rand(S, B, generator=generator, dtype=torch.float64)


def train_once(
    mesh: Mesh, sequence_parallel: bool, num_slices: int = 1, compiles: bool = False
) -> tuple[torch.Tensor, dict[str, Parts], dict[str, Parts]]:
    """Returns loss per token, and parameters and gradients as (offsets, lengths, part).

    With `compiles` the forward pass runs, eagerly, what a compiler would trace.
    """
    model = Network(mesh, sequence_parallel)
    overlap_forward(model, num_slices)
    table = collect_shardings(model)
    initialize_parameters(model, seed=3, mesh=mesh)
    with torch.no_grad():  # not zero, so that a doubled bias is detected
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                normal_(parameter, seed=3, name=name, sharding=table[name], std=0.3, mesh=mesh)
    tokens, targets, weights = batch()
    buffers = GradientBuffers(model.named_parameters(), table, mesh)
    assert len(fuse_gradient_accumulation([model], [buffers]).fused) == 5
    with mock.patch.object(torch.compiler, "is_compiling", lambda: compiles):
        loss = model(tokens, targets)
    (loss * weights).sum().backward()
    buffers.finish()
    grads = buffers.gradients()
    parts = [
        {n: [(v.offsets, v.lengths, v.tensor) for v in views] for n, views in found.items()}
        for found in (parameter_views(model, table, mesh), parameter_views(grads, table, mesh))
    ]
    return loss.detach(), parts[0], parts[1]


def whole(
    parts: list[dict[str, Parts]], shapes: dict[str, tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """Assembles global tensors from all parts; replicated parts must be equal."""
    tensors = {
        name: torch.full(shape, torch.nan, dtype=torch.float64) for name, shape in shapes.items()
    }
    for rank_parts in parts:
        for name, boxes in rank_parts.items():
            for offsets, lengths, part in boxes:
                place = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
                there = tensors[name][place]
                assert torch.isnan(there).all() or torch.allclose(there, part, rtol=0, atol=1e-12)
                tensors[name][place] = part
    return tensors


@pytest.fixture(scope="module")
def reference() -> Reference:
    mesh = Mesh.single()
    _, parts, _ = train_once(mesh, False)
    shapes = {name: s.shape for name, s in collect_shardings(Network(mesh, False)).items()}
    parameters = {n: t.requires_grad_() for n, t in whole([parts], shapes).items()}
    tokens, targets, weights = batch()
    loss = plain_loss(parameters, tokens, targets)
    (loss * weights).sum().backward()
    grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    return loss.detach(), {n: p.detach() for n, p in parameters.items()}, grads


def check(
    results: list[Outcome],
    reference: Reference,
) -> None:
    loss, parameters, grads = reference
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    for rank_loss, _, _ in results:
        assert (rank_loss - loss).abs().max() < 1e-12
    found = whole([result[1] for result in results], shapes)
    found_grads = whole([result[2] for result in results], shapes)
    for name in parameters:
        assert torch.equal(found[name], parameters[name])
        error = (found_grads[name] - grads[name]).abs().max() / grads[name].abs().max()
        assert error < 1e-12, name


def test_one_rank_equals_plain_torch(
    reference: Reference,
) -> None:
    check([train_once(Mesh.single(), False)], reference)
    check([train_once(Mesh.single(), True)], reference)
    check([train_once(Mesh.single(), True, compiles=True)], reference)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence-parallel"])
def test_ranks_equal_plain_torch(
    worker_pool: WorkerPool,
    reference: Reference,
    ranks: int,
    sequence_parallel: bool,
) -> None:
    found = worker_pool.run_mesh(TP[ranks], train_both_ways, sequence_parallel, ranks=ranks)
    for results in zip(*found, strict=True):
        check(list(results), reference)


def train_both_ways(mesh: Mesh, sequence_parallel: bool) -> list[Outcome]:
    """Returns the results of eager code, and of that for a compiler, which forms no slices."""
    return [
        train_once(mesh, sequence_parallel, slices, compiles)
        for slices, compiles in ((1, False), (4, True))
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_communication_in_slices_does_not_change_results(
    worker_pool: WorkerPool, reference: Reference, ranks: int
) -> None:
    check(worker_pool.run_mesh(TP[ranks], train_once, True, 4, ranks=ranks), reference)


def halves(mesh: Mesh, fresh: bool) -> tuple[dict[str, int], float]:
    """Returns collectives and gradient errors of a split backward pass of a row layer in slices."""
    row = RowParallelLinear(8, H, mesh, bias=False, sequence_parallel=True, dtype=torch.float64)
    initialize_parameters(row, seed=3, mesh=mesh)
    overlap_forward(row, 4)
    generator = torch.Generator().manual_seed(mesh.rank)
    x = torch.randn(S, B, 8 // 2, generator=generator, dtype=torch.float64, requires_grad=True)
    y = row(x)
    dy = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    wanted = torch.autograd.grad(y, [x, row.weight], dy, retain_graph=True)
    with mesh.counting() as traffic:
        (dx,) = torch.autograd.grad(y, [x], dy, retain_graph=True)
        (dweight,) = torch.autograd.grad(y, [row.weight], 2 * dy if fresh else dy)
    off = max((dx - wanted[0]).abs().max(), (dweight / (1 + fresh) - wanted[1]).abs().max())
    return {record.operation: record.calls for record in traffic.records}, float(off)


@pytest.mark.parametrize("fresh", [False, True])
def test_both_halves_of_a_backward_pass_share_the_gathered_gradient(
    worker_pool: WorkerPool, fresh: bool
) -> None:
    """Except for different output gradients."""
    for calls, off in worker_pool.run_mesh(TP[2], halves, fresh, ranks=2):
        assert calls == {"all_gather": 1 + fresh} and off < 1e-12


def test_layers_are_built_without_values(single: Mesh) -> None:
    layer = ColumnParallelLinear(4, 6, single)
    assert layer.weight.isnan().all()
    meta = ColumnParallelLinear(4, 6, single, device="meta", dtype=torch.bfloat16)
    assert meta.weight.is_meta and meta.weight.dtype is torch.bfloat16
    initialize_parameters(meta.to_empty(device="cpu"), seed=0, mesh=single)
    assert meta.weight.isfinite().all() and not meta.bias.any()


def test_weight_decay_and_cut_dims_of_layers(single: Mesh) -> None:
    column = ColumnParallelLinear(4, (2, 6), single, dim=1, fused_dim=0)
    row = RowParallelLinear(6, 4, single)
    assert [s.weight_decay for s in (*column.sharding.values(), *row.sharding.values())] == [
        True,
        False,
        True,
        False,
    ]
    assert (column.sharding["bias"].dim, row.sharding["bias"].dim) == (1, None)
    assert (row.sharding["weight"].dim, row.sharding["weight"].axis) == (1, "tp")
    parted = RowParallelLinear(6, 4, single, sequence_parallel=True)
    assert [s.partial for s in row.sharding.values()] == [None, None]
    assert [s.partial for s in parted.sharding.values()] == [None, "tp"]


def test_the_bias_of_several_outputs_is_no_matrix() -> None:
    """Checks that rules for matrices, such as Muon, leave it alone."""
    found = ColumnSpec(in_features=3, out_features=(4, 2)).shardings()
    assert (found["weight"].matrix, found["bias"].matrix) == ((8, 3), None)
    assert found["weight"].hidden_matrix and not found["bias"].hidden_matrix


def test_a_spec_cuts_the_first_dim_of_the_output_by_default() -> None:
    place = AbstractMesh(ParallelLayout(tp=2, dp=1), rank=1)
    plain = ColumnSpec(in_features=3, out_features=(4, 2))
    other = ColumnSpec(in_features=3, out_features=(4, 2), dim=1)
    shapes = {
        spec: {name: each.local_shape(place) for name, each in spec.shardings().items()}
        for spec in (plain, other)
    }
    assert shapes[plain] == {"weight": (2, 2, 3), "bias": (2, 2)}
    assert shapes[other] == {"weight": (4, 1, 3), "bias": (4, 1)}


def one_token(mesh: Mesh) -> torch.Tensor:
    """Returns logits of a single token from layers with sequence parallelism."""
    model = Network(mesh, sequence_parallel=mesh.axis("tp").size > 1)
    overlap_forward(model, 4)
    initialize_parameters(model, seed=3, mesh=mesh)
    whole = {"sequence_parallel": False}
    with torch.no_grad():
        x = model.embedding(batch()[0][:1], **whole)
        x = x + model.out(torch.tanh(model.qkv(x, **whole)).flatten(-2), **whole)
        logits = model.embedding.output(x, 4, **whole)
    return all_gather(logits, mesh.axis("tp"), dim=-1)[..., :VOCAB]


def test_a_call_can_disable_sequence_parallelism(worker_pool: WorkerPool) -> None:
    expected = one_token(Mesh.single())
    for logits in worker_pool.run_mesh(TP[2], one_token, ranks=2):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


def test_the_text_of_a_layer_has_its_global_shape_and_cut() -> None:
    mesh = Mesh(ParallelLayout(tp=2, dp=1), 0)
    cut = ", sequence parallel"
    for sequence_parallel in (False, True):
        ending = cut if sequence_parallel else ""
        options = {"sequence_parallel": sequence_parallel, "device": "meta"}
        column = ColumnParallelLinear(8, (6, 2), mesh, **options)
        row = RowParallelLinear(6, 4, mesh, **options)
        words = VocabParallelEmbedding(37, 8, mesh, padded=48, **options)
        for layer, shape, dim in ((column, (6, 2, 8), 0), (row, (4, 6), 1), (words, (37, 8), 0)):
            assert layer.extra_repr() == f"{shape}, dim {dim} over tp 2{ending}"
            assert repr(layer).startswith(f"{type(layer).__name__}({layer.extra_repr()}")
