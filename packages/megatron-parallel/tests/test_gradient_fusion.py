"""Fused gradient accumulation: the same numbers, without a matrix for the weight gradient."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron_parallel import (
    ColumnParallelLinear,
    DataParallelConfig,
    GradientBuffers,
    LayoutError,
    Mesh,
    ParallelLayout,
    RowParallelLinear,
    Sharding,
    VocabParallelEmbedding,
    collect_shardings,
    initialize_parameters,
)
from megatron_parallel.data_parallel import GradientFusion, ProductOp, fuse_gradient_accumulation
from megatron_parallel.data_parallel import fusion as fusion_module
from megatron_parallel.tensor_parallel import (
    PLAIN,
    AccumulatingProduct,
    ProductLayer,
    is_product_layer,
)
from megatron_parallel.testing import WorkerPool
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

H, FFN, VOCAB, ROWS = 24, 40, 64, 4
"""No activation has as many elements as a weight."""


class Model(nn.Module):
    """A weight with three dims, a row-parallel one, a frozen one, and one that is used twice."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(VOCAB, H, mesh, dtype=dtype)
        self.embedding.product = PLAIN
        self.up = ColumnParallelLinear(H, (2, FFN), mesh, dim=1, fused_dim=0, dtype=dtype)
        self.down = RowParallelLinear(FFN, H, mesh, dtype=dtype)
        self.frozen = ColumnParallelLinear(H, H, mesh, bias=False, dtype=dtype)
        self.frozen.weight.requires_grad_(False)
        initialize_parameters(self, seed=1, mesh=mesh)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.embedding(x)).unbind(-2)
        y = self.down(gate.sigmoid() * up) + self.frozen.weight[0, 0]
        return self.embedding.output(y).square().sum()


def tokens(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(VOCAB, (ROWS,), generator=generator)


def built(
    mesh: Mesh, dtype: torch.dtype = torch.float64, **settings: Any
) -> tuple[Model, GradientBuffers]:
    model = Model(mesh, dtype)
    config = DataParallelConfig(**settings)
    return model, GradientBuffers(model.named_parameters(), collect_shardings(model), mesh, config)


def step(
    model: Model, buffers: GradientBuffers, around: Callable[[int, Tensor], None] | None = None
) -> dict[str, Tensor]:
    """Runs three micro-batches."""
    for number in range(3):
        buffers.begin(last=number == 2)
        loss = model(tokens(number))
        if around is None:
            loss.backward()
        else:
            around(number, loss)
    buffers.finish()
    return {name: gradient.clone() for name, gradient in buffers.gradients().items()}


class Made(TorchDispatchMode):
    """Counts tensors of given numbers of elements that operations put into new memory."""

    def __init__(self, sizes: set[int]) -> None:
        super().__init__()
        self.sizes = sizes
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {
            t.untyped_storage().data_ptr()
            for t in (*args, *(kwargs or {}).values())
            if isinstance(t, Tensor)
        }
        if isinstance(found, Tensor) and found.untyped_storage().data_ptr() not in given:
            elements = found.untyped_storage().nbytes() // found.element_size()
            self.count += elements in self.sizes
        return found


def made_in_backward(mesh: Mesh, fused: bool) -> list[int]:
    """Returns the number of matrices of a weight's size that each backward pass allocates."""
    model, buffers = built(mesh)
    if fused:
        fuse_gradient_accumulation([model], [buffers])
    sizes = {model.up.weight.numel(), model.down.weight.numel()}
    counts = []

    def counted(number: int, loss: Tensor) -> None:
        with Made(sizes) as made:
            loss.backward()
        counts.append(made.count)

    step(model, buffers, counted)
    return counts


def test_no_matrix_is_made_for_the_gradient_of_a_weight(worker_pool: WorkerPool) -> None:
    assert worker_pool.run_mesh(ParallelLayout(tp=2, dp=2), made_in_backward, True) == [[0] * 3] * 4
    assert (
        worker_pool.run_mesh(ParallelLayout(tp=2, dp=2), made_in_backward, False) == [[2] * 3] * 4
    )


def test_on_one_rank_a_matrix_is_made_once_a_step(single: Mesh) -> None:
    """On one rank that matrix is the main gradient."""
    assert made_in_backward(single, True) == [2, 0, 0]
    assert made_in_backward(single, False) == [2, 2, 2]


def both_ways(mesh: Mesh, settings: dict[str, Any]) -> tuple[float, tuple[str, ...]]:
    """Returns the largest difference of any gradient in two steps, and the fused weights."""
    model, buffers = built(mesh, **settings)
    truth = step(model, buffers)
    buffers.zero()
    fusion = fuse_gradient_accumulation([model], [buffers])
    found = step(model, buffers)
    buffers.zero()
    steps = found, step(model, buffers)
    differences = [(taken[name] - g).abs().max() for taken in steps for name, g in truth.items()]
    return float(max(differences)), fusion.fused


@pytest.mark.parametrize(
    "settings", [{}, {"use_distributed_optimizer": True}], ids=["whole", "sharded"]
)
@pytest.mark.parametrize("size", [500, 2**20])
def test_products_and_autograd_give_the_same_gradients(
    worker_pool: WorkerPool, single: Mesh, settings: dict[str, Any], size: int
) -> None:
    weights = ("embedding.weight", "up.weight", "down.weight")  # not the frozen one
    settings = {**settings, "ddp_bucket_size": size}
    for difference, fused in worker_pool.run_mesh(ParallelLayout(dp=2), both_ways, settings):
        assert difference < 1e-12 and fused == weights
    assert both_ways(single, settings)[0] < 1e-12


# -- split backward passes, and torch.autograd.grad ------------------------------------------------


def test_the_weight_half_of_a_split_pass_makes_no_matrix_either(single: Mesh) -> None:
    """torch requests the gradients and adds the results to `.grad`, without hooks."""
    model, buffers = built(single)
    truth = step(model, buffers)
    buffers.zero()
    fuse_gradient_accumulation([model], [buffers])
    parameters = [p for p in model.parameters() if p.requires_grad]
    sizes = {model.up.weight.numel(), model.down.weight.numel()}
    counts = []
    for number in range(3):
        loss = model(tokens(number))
        with buffers.weight_backward(), Made(sizes) as made:
            for parameter, found in zip(
                parameters, torch.autograd.grad(loss, parameters), strict=True
            ):
                parameter.grad = found if parameter.grad is None else parameter.grad + found
        counts.append(made.count)
    buffers.start_reductions()
    buffers.finish()
    assert counts == [2, 0, 0]
    for name, gradient in buffers.gradients().items():
        torch.testing.assert_close(gradient, truth[name], rtol=1e-12, atol=1e-12)


def test_autograd_grad_returns_the_gradient_of_a_fused_weight(single: Mesh) -> None:
    model, buffers = built(single)
    (wanted,) = torch.autograd.grad(model(tokens(0)), [model.up.weight])
    fuse_gradient_accumulation([model], [buffers])
    (found,) = torch.autograd.grad(model(tokens(0)), [model.up.weight])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert model.up.weight.grad is None


def test_torch_calls_hooks_of_a_parameter_whose_gradient_is_none() -> None:
    """The buffers rely on this behaviour of torch."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
            return None, None

    weight, called = Parameter(torch.ones(2)), []
    weight.register_post_accumulate_grad_hook(called.append)
    twice = Nothing.apply(torch.ones(2), weight) + Nothing.apply(torch.ones(2), weight)
    twice.sum().backward()
    assert len(called) == 1 and weight.grad is None


# -- where fusion is not supported, and where it ends ----------------------------------------------


def test_product_layers_are_found_by_their_attributes_alone(single: Mesh) -> None:
    """`isinstance` finds no parameter of a module on Python 3.12, and raises on any version."""
    model, _ = built(single, torch.float32)
    assert is_product_layer(model.up) and is_product_layer(model.embedding)
    assert not is_product_layer(torch.nn.Linear(2, 2)) and not is_product_layer(model)
    with pytest.raises(TypeError):
        isinstance(model.up, ProductLayer)


def test_weights_that_are_not_fused_have_a_reason(single: Mesh) -> None:
    model, buffers = built(single, torch.bfloat16)
    fusion = fuse_gradient_accumulation([model], [buffers])
    reason = f"torch {torch.__version__} has no products of bfloat16 added up in float32 on cpu"
    assert set(fusion.not_fused.values()) == {reason} and not fusion.fused
    assert str(fusion) == (
        f"gradient accumulation is fused for 0 of 3 weight matrices; not for 3: {reason}"
    )
    assert str(GradientFusion(disabled_reason="so")) == "gradient accumulation is not fused: so"
    assert model.up.product is PLAIN


class OfExperts(nn.Module):
    """A layer of two experts, whose matrices are multiplied in groups."""

    product, product_parameters = PLAIN, ("weight",)

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.ones(2, 3, 4))
        self.sharding = {"weight": Sharding((2, 3, 4), experts=True)}


def test_products_of_experts_are_not_fused(single: Mesh) -> None:
    layer = OfExperts()
    buffers = GradientBuffers(layer.named_parameters(), layer.sharding, single)
    fusion = fuse_gradient_accumulation([layer], [buffers])
    assert not fusion.fused and not fusion.not_fused and layer.product is PLAIN


def test_another_operation_can_be_passed(single: Mesh) -> None:
    """Passes an operation that sums products of bf16 in fp32, which torch supports on CUDA only."""

    def add(into: Tensor, dy: Tensor, x: Tensor, *, first: bool) -> None:
        product = dy.float().t() @ x.float()
        into.copy_(product) if first else into.add_(product)

    model, buffers = built(single, torch.bfloat16)
    truth = step(model, buffers)
    buffers.zero()
    fusion = fuse_gradient_accumulation([model], [buffers], ProductOp(add, lambda *_: None))
    assert len(fusion.fused) == 3
    for _ in range(2):
        found = step(model, buffers)
        assert all(p.grad is None for p in model.parameters())
        for name in ("up.weight", "down.weight", "embedding.weight"):
            assert found[name].dtype == torch.float32
            torch.testing.assert_close(found[name], truth[name], rtol=0.02, atol=0.05)
            assert found[name].bfloat16().float().ne(found[name]).any()  # never rounded
        buffers.zero()


def test_gradients_in_bf16_are_added_up_in_bf16(single: Mesh) -> None:
    model, buffers = built(single, torch.bfloat16, accumulate_allreduce_grads_in_fp32=False)
    truth = step(model, buffers)
    buffers.zero()
    assert len(fuse_gradient_accumulation([model], [buffers]).fused) == 3
    for name, gradient in step(model, buffers).items():
        torch.testing.assert_close(gradient, truth[name], rtol=0.02, atol=0.05)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_cuda_products_of_bf16_are_added_up_in_fp32() -> None:
    mesh = Mesh.single(device="cuda")
    model, buffers = built(mesh, torch.bfloat16)
    fusion = fuse_gradient_accumulation([model], [buffers])
    assert len(fusion.fused) == 3, str(fusion)


def test_a_product_that_comes_too_late_is_refused(single: Mesh) -> None:
    model, buffers = built(single)
    fuse_gradient_accumulation([model], [buffers])
    truth = step(model, buffers)
    with pytest.raises(LayoutError, match="came after the reduction of its bucket"):
        model(tokens(0)).backward()
    for name, gradient in buffers.gradients().items():
        assert torch.equal(gradient, truth[name])


def test_closing_the_buffers_ends_fusion(single: Mesh) -> None:
    model, buffers = built(single)
    fuse_gradient_accumulation([model], [buffers])
    step(model, buffers)
    buffers.zero()
    buffers.close()
    model(tokens(0)).backward()
    assert model.up.weight.grad is not None and model.up.weight.grad.any()


def test_a_copy_of_a_layer_leaves_gradients_to_autograd(single: Mesh) -> None:
    model, buffers = built(single)
    fuse_gradient_accumulation([model], [buffers])
    assert isinstance(model.up.product, AccumulatingProduct)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again.up.product == PLAIN


@pytest.mark.parametrize(("ignores", "refusal"), [(None, None), (True, "has wrong products")])
def test_a_product_that_does_not_add_up_is_refused(
    monkeypatch: pytest.MonkeyPatch, ignores: bool | None, refusal: str | None
) -> None:
    calls = []

    def product(into: Tensor, dy: Tensor, x: Tensor, *, first: bool) -> None:
        calls.append(first)
        made = dy.t().to(into.dtype) @ x.to(into.dtype)
        if first if ignores is None else ignores:
            into.copy_(made)
        else:
            into.add_(made)

    monkeypatch.setattr(fusion_module, "add_product", product)
    found = fusion_module.why_product_unsupported(
        torch.bfloat16, torch.float32, torch.device("cpu")
    )
    assert calls == [True, False]
    assert found is None if refusal is None else found is not None and refusal in found
