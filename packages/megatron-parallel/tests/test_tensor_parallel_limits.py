"""Parallel layers at their limits, in one process without communication."""

import weakref
from types import SimpleNamespace
from typing import Any

import megatron_parallel.tensor_parallel.added_product as added_product
import megatron_parallel.tensor_parallel.layers as layers
import megatron_parallel.tensor_parallel.linear as linear
import megatron_parallel.tensor_parallel.lookup as lookup
import megatron_parallel.tensor_parallel.product as product
import megatron_parallel.tensor_parallel.sliced_linear as sliced_linear
import pytest
import torch
from megatron_parallel import (
    ColumnParallelLinear,
    Mesh,
    ParallelLayout,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron_parallel.tensor_parallel import (
    ColumnSpec,
    LoRA,
    RowSpec,
    VocabSpec,
    column_parallel_linear,
    multiply_matrix,
    row_parallel_linear,
)
from megatron_parallel.tensor_parallel.linear_options import linear_options
from torch import Tensor
from torch.nn import functional

from .test_saving_product import HalvesInput

RANKS = [Mesh(ParallelLayout(tp=2, dp=1), rank) for rank in range(2)]
AXIS = RANKS[1].axis("tp")


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("rows", [3, 1])
def test_a_rank_reads_its_own_rows_of_a_vocabulary_and_zeros_for_others(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(layers, "reduce_from_axis", lambda x, axis: x)
    for rank, mesh in enumerate(RANKS):
        layer = VocabParallelEmbedding(2 * rows, 2, mesh)
        with torch.no_grad():
            layer.weight.copy_(torch.arange(1.0, 1 + 2 * rows).view(rows, 2))
        expected = torch.zeros(2 * rows, 2)
        expected[rank * rows : (rank + 1) * rows] = layer.weight.detach()
        assert torch.equal(layer(torch.arange(2 * rows)), expected)


@pytest.mark.parametrize("token", [4, -1])
def test_one_rank_refuses_a_token_outside_its_vocabulary(single: Mesh, token: int) -> None:
    with pytest.raises((IndexError, RuntimeError)):
        VocabParallelEmbedding(4, 2, single)(torch.tensor([token]))


def test_layers_of_specs_are_not_sequence_parallel_by_default() -> None:
    assert not ColumnParallelLinear.from_spec(ColumnSpec(3, (4,)), RANKS[0]).sequence_parallel
    assert not RowParallelLinear.from_spec(RowSpec(4, 3), RANKS[0]).sequence_parallel
    assert not VocabParallelEmbedding.from_spec(VocabSpec(4, 3), RANKS[0]).sequence_parallel


def test_functions_neither_cut_the_sequence_nor_form_slices_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, weight, bias = drawn(4, 3), drawn(5, 3), drawn(5)
    y = column_parallel_linear(x, weight, bias, AXIS)  # without any communication
    torch.testing.assert_close(y, functional.linear(x, weight, bias))
    calls: list[str] = []
    for name in ("reduce_from_axis", "scatter_sequence", "all_gather"):
        monkeypatch.setattr(linear, name, lambda t, axis, name=name: calls.append(name) or t)
    row_parallel_linear(x, weight, AXIS)
    row_parallel_linear(x, weight, AXIS, True)
    column_parallel_linear(x, weight, None, AXIS, True)
    assert calls == ["reduce_from_axis", "scatter_sequence", "all_gather"]


@pytest.mark.parametrize(
    ("length", "limit", "count"),
    [(0, 4, 1), (1, 1, 1), (6, 4, 3), (7, 4, 1), (8, 4, 4), (3, 8, 3), (12, 5, 4), (9, 2, 1)],
)
def test_slices_are_equal_and_as_many_as_possible(length: int, limit: int, count: int) -> None:
    assert sliced_linear.divisor(length, limit) == count


def test_nothing_is_saved_of_a_slice() -> None:
    asked: list[tuple[bool, bool]] = []

    class Asked(HalvesInput):
        def forward_saving(self, x: Any, weights: Any, bias: Any, multiply: Any, **options: Any):  # type: ignore[no-untyped-def]
            asked.append((options["saves"], options["by_rows"]))
            return super().forward_saving(x, weights, bias, multiply, **options)  # type: ignore[no-untyped-call]

    weights = (drawn(5, 3).requires_grad_(),)
    options = linear_options(Asked(), AXIS, True, 2, weights)
    y, _ = options.forward(drawn(4, 3), weights, None)
    assert torch.equal(options.of_slice(drawn(4, 3), weights), y)
    assert asked == [(True, True), (False, True)]


class Done(SimpleNamespace):
    """A collective that is complete."""

    def wait(self) -> Tensor:
        return self.result


@pytest.mark.parametrize("trained", [False, True])
def test_the_gathered_gradient_is_kept_only_if_a_weight_needs_it_later(
    monkeypatch: pytest.MonkeyPatch, trained: bool
) -> None:
    """Both ranks have the same positions."""
    gathered: list[Any] = []

    def gather(t: Tensor, axis: Any) -> Tensor:
        whole = torch.cat([t, t])
        gathered.append(weakref.ref(whole))
        return whole

    def scatter(t: Tensor, axis: Any) -> Done:
        return Done(result=t.chunk(2)[axis.index])

    monkeypatch.setattr(sliced_linear, "all_gather", gather)
    monkeypatch.setattr(sliced_linear, "start_reduce_scatter", scatter)
    x, weight = drawn(4, 2).requires_grad_(), drawn(3, 2).requires_grad_(trained)
    y = row_parallel_linear(x, weight, AXIS, True, 2)
    torch.testing.assert_close(y, functional.linear(x, weight)[2:])
    (dx,) = torch.autograd.grad(y.sum(), [x], retain_graph=True)
    torch.testing.assert_close(dx, weight.detach().sum(0).expand(4, 2))
    assert (gathered[0]() is not None) == trained


# -- which operations of torch are called ----------------------------------------------------------


class OnGpu(Tensor):
    """A tensor in host memory that looks like one of a GPU."""

    is_cuda = True


def test_compiled_code_of_a_cpu_adds_the_bias_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = drawn(4, 3), drawn(5, 3), drawn(5)
    expected, fused = functional.linear(x, weight, bias), []

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        fused.append(bias is not None)
        return functional.linear(x, weight, bias)

    monkeypatch.setattr(product, "functional", SimpleNamespace(linear=multiply))
    for compiles in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiles=compiles: compiles)
        for given in (x, x.as_subclass(OnGpu)):
            y = multiply_matrix(given, weight, bias).as_subclass(Tensor)
            torch.testing.assert_close(y, expected)
    assert fused == [True, True, False, True]


@pytest.mark.parametrize(
    ("device", "compiles", "calls"), [("cpu", False, 0), ("cpu", True, 1), ("meta", False, 1)]
)
def test_rows_are_read_by_torchs_embedding_where_it_adds_gradients_in_float32(
    monkeypatch: pytest.MonkeyPatch, device: str, compiles: bool, calls: int
) -> None:
    seen: list[Tensor] = []

    def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
        seen.append(tokens)
        return functional.embedding(tokens, weight)

    monkeypatch.setattr(lookup, "functional", SimpleNamespace(embedding=embedding))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiles)
    weight, tokens = torch.ones(4, 2, device=device), torch.ones(3, dtype=torch.long, device=device)
    assert lookup.select_rows(weight, tokens).shape == (3, 2)
    assert len(seen) == calls


def test_a_product_is_added_in_the_dtype_of_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where torch sums products of bf16 in fp32."""
    dy, x = drawn(4, 2).bfloat16(), drawn(4, 3).bfloat16()
    exact = dy.float().t() @ x.float()

    def mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        return out.copy_(a.to(out_dtype) @ b.to(out_dtype))

    def addmm(into: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        return out.copy_(into + a.to(out_dtype) @ b.to(out_dtype))

    for factors in ((dy.float(), x.float()), (dy, x)):
        into = torch.full((2, 3), torch.nan)  # as memory without values may be
        if factors[0] is dy:
            monkeypatch.setattr(added_product, "torch", SimpleNamespace(mm=mm, addmm=addmm))
        added_product.add_product(into, *factors, first=True)
        torch.testing.assert_close(into, exact)
        added_product.add_product(into, *factors, first=False)
        torch.testing.assert_close(into, 2 * exact)


def test_an_adapter_of_experts_with_one_dim_of_outputs_is_merged() -> None:
    weight, a, b = drawn(3, 5, 4), drawn(3, 2, 4), drawn(3, 5, 2)
    merged = LoRA(rank=2, alpha=6.0).merged_weight((weight, a, b))
    for expert in range(3):
        torch.testing.assert_close(merged[expert], weight[expert] + 3.0 * b[expert] @ a[expert])
