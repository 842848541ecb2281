"""Output layer and loss as one operation: results of the unfused loss with less memory."""

from functools import partial
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
    collect_shardings,
    initialize_parameters,
)
from megatron_parallel.data_parallel import fuse_gradient_accumulation
from megatron_parallel.sharding import Init
from megatron_parallel.tensor_parallel import (
    IGNORE_INDEX,
    PLAIN,
    UNFUSED_CROSS_ENTROPY,
    LinearCrossEntropy,
    LogitsCrossEntropy,
    LoRA,
    VocabularyLoss,
    freeze_all_but_adapters,
    with_logits_block,
)
from megatron_parallel.testing import WorkerPool
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

S, B, H, VOCAB, PADDED = 8, 2, 5, 21, 32


def drawn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def labels() -> Tensor:
    found = torch.randint(VOCAB, (S, B), generator=torch.Generator().manual_seed(3))
    return found.index_put((torch.tensor([2]), torch.tensor([1])), torch.tensor(IGNORE_INDEX))


class Block:
    """The definition of a `LogitsBlock`, with autograd as its backward pass."""

    def forward(self, logits: Tensor, columns: Tensor, valid: int) -> tuple[Tensor, Tensor, Tensor]:
        values = logits[..., :valid].to(torch.promote_types(logits.dtype, torch.float32))
        hot = columns[..., None] == torch.arange(valid)
        at_target = values.masked_fill(~hot, -torch.inf).logsumexp(-1)
        return values.logsumexp(-1), at_target, values.sum(-1)

    def backward(
        self,
        logits: Tensor,
        columns: Tensor,
        whole: Tensor,
        upstream: Tensor,
        valid: int,
        *,
        at_target: float,
        everywhere: float,
        overwrites: bool,
    ) -> Tensor:
        assert overwrites
        numbers = torch.arange(logits.shape[-1])
        found = (logits - whole[..., None]).exp() - everywhere
        found = found - (columns[..., None] == numbers).to(found.dtype) * at_target
        return logits.copy_(torch.where(numbers < valid, found * upstream[..., None], 0.0))


def set_bias(part: Tensor, mesh: Mesh) -> None:
    """Fills this rank's part of a bias of the vocabulary, without the padding."""
    whole, tp = nn.functional.pad(drawn(4, VOCAB), (0, PADDED - VOCAB)), mesh.axis("tp")
    with torch.no_grad():
        part.copy_(whole.chunk(tp.size)[tp.index])


def step(
    mesh: Mesh,
    loss: Any,
    cut: bool,
    smoothing: float,
    how: str,
    softcap: float = 0.0,
    equal: bool = False,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    """Returns losses of a batch, and gradients of input and weights over two micro-batches."""
    product = LoRA(2, 3.0) if how == "lora" else PLAIN
    layer = ColumnParallelLinear(
        H,
        VOCAB,
        mesh,
        bias=how == "biased",
        padded=PADDED,
        sequence_parallel=cut,
        init=Init("normal", 1.0),
        product=product,
        dtype=dtype,
    )
    initialize_parameters(layer, seed=1, mesh=mesh)
    if how == "lora":
        nn.init.constant_(layer.lora_b, 0.5)
    if layer.bias is not None:
        set_bias(layer.bias, mesh)
    freeze_all_but_adapters([layer], [product])
    table = collect_shardings(layer)
    buffers = GradientBuffers(layer.named_parameters(), table, mesh, DataParallelConfig())
    if how == "fused":
        assert fuse_gradient_accumulation([layer], [buffers]).fused == ("weight",)
    tp = mesh.axis("tp")
    whole = drawn(1, S, B, H)
    x = (whole.chunk(tp.size)[tp.index] if cut else whole).to(dtype, copy=True).requires_grad_()
    settings = {"targets": labels(), "true_vocab": VOCAB, "label_smoothing": smoothing}
    settings["softcap"] = softcap
    losses = torch.empty(0)
    for _ in range(2):
        losses = layer(x, loss=partial(loss, **settings))
        (losses * (0.3 if equal else drawn(2, S, B))).sum().backward()
    buffers.finish()
    gradients = {
        name: [(p.box, gradient[p.local.slices].clone()) for p in table[name].shard_boxes(mesh)]
        for name, gradient in buffers.gradients().items()
    }
    return {"losses": losses.detach(), "x": x.grad, "gradients": gradients}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["plain", "biased", "fused", "lora"])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    ("tokens", "smoothing", "softcap"), [(5, 0.0, 0.0), (4, 0.2, 0.7), (100, 0.0, 0.0)]
)
def test_linear_cross_entropy_on_ranks_equals_the_unfused_loss_of_one(
    worker_pool: WorkerPool,
    single: Mesh,
    tokens: int,
    smoothing: float,
    softcap: float,
    cut: bool,
    how: str,
) -> None:
    alone = "plain" if how == "fused" else how
    truth = step(single, UNFUSED_CROSS_ENTROPY, False, smoothing, alone, softcap)
    layout = ParallelLayout(tp=2, dp=1)
    found = worker_pool.run_mesh(
        layout, step, LinearCrossEntropy(tokens), cut, smoothing, how, softcap
    )
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    for rank in found:
        close(rank["losses"], truth["losses"])
        for name, ((_, whole),) in truth["gradients"].items():
            for box, gradient in rank["gradients"][name]:
                close(gradient, whole[box.slices])
    close(torch.cat([r["x"] for r in found]) if cut else found[0]["x"], truth["x"])


@pytest.mark.parametrize(
    ("loss", "equal"),
    [
        (LogitsCrossEntropy(), False),
        (LinearCrossEntropy(5), False),
        (LinearCrossEntropy(5, "forward"), True),
    ],
    ids=["logits", "few, backward", "few, forward"],
)
@pytest.mark.parametrize(("smoothing", "softcap"), [(0.0, 0.0), (0.2, 0.7)])
def test_a_block_on_ranks_computes_the_loss_of_one(
    worker_pool: WorkerPool,
    single: Mesh,
    smoothing: float,
    softcap: float,
    loss: VocabularyLoss,
    equal: bool,
) -> None:
    truth = step(single, UNFUSED_CROSS_ENTROPY, False, smoothing, "biased", softcap, equal)
    with_block = with_logits_block(loss, Block())
    assert with_block != loss and with_logits_block(with_block, Block()) is with_block
    arguments = with_block, True, smoothing, "biased", softcap, equal
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    # The second of two ranks has padding; of four, the last has nothing else.
    for ranks in (1, 2, 4):
        found = worker_pool.run_mesh(ParallelLayout(tp=ranks, dp=1), step, *arguments)
        for rank in found:
            close(rank["losses"], truth["losses"])
            for name, ((_, whole),) in truth["gradients"].items():
                for box, gradient in rank["gradients"][name]:
                    close(gradient, whole[box.slices])
        parts = [rank["x"] for rank in found]
        close(torch.cat(parts) if len(parts) > 1 else parts[0], truth["x"])


@pytest.mark.parametrize("how", ["plain", "biased", "fused", "lora"])
@pytest.mark.parametrize("cut", [False, True])
def test_gradients_of_the_forward_pass_on_ranks_equal_those_of_one(
    worker_pool: WorkerPool, single: Mesh, cut: bool, how: str
) -> None:
    alone = "plain" if how == "fused" else how
    truth = step(single, UNFUSED_CROSS_ENTROPY, False, 0.2, alone, 0.7, True)
    loss = LinearCrossEntropy(5, "forward")
    found = worker_pool.run_mesh(ParallelLayout(tp=2, dp=1), step, loss, cut, 0.2, how, 0.7, True)
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    for rank in found:
        close(rank["losses"], truth["losses"])
        for name, ((_, whole),) in truth["gradients"].items():
            for box, gradient in rank["gradients"][name]:
                close(gradient, whole[box.slices])
    close(torch.cat([r["x"] for r in found]) if cut else found[0]["x"], truth["x"])


@pytest.mark.parametrize("gradients", ["forward", "backward"])
def test_gradients_in_16_bits_are_summed_in_float32(single: Mesh, gradients: Any) -> None:
    exact = step(single, UNFUSED_CROSS_ENTROPY, False, 0.0, "biased", 0.0, True)
    loss = LinearCrossEntropy(1, gradients)
    found = step(single, loss, False, 0.0, "biased", 0.0, True, torch.bfloat16)
    for name, ((_, gradient),) in found["gradients"].items():
        ((_, whole),) = exact["gradients"][name]
        error = (gradient.double() - whole).abs().max() / whole.abs().max()
        assert error < 2e-2, name
    assert (found["x"].double() - exact["x"]).abs().max() < 2e-2


def test_losses_with_different_gradients_need_those_of_the_backward_pass(single: Mesh) -> None:
    with pytest.raises(LayoutError, match="differ between tokens with a label"):
        step(single, LinearCrossEntropy(5, "forward"), False, 0.0, "plain")


def test_a_second_backward_pass_with_gradients_of_the_forward_pass_is_refused(
    single: Mesh,
) -> None:
    layer = ColumnParallelLinear(H, VOCAB, single, bias=False)
    initialize_parameters(layer, seed=1, mesh=single)
    loss = partial(LinearCrossEntropy(5, "forward"), targets=labels(), true_vocab=VOCAB)
    losses = layer(drawn(1, S, B, H).float(), loss=loss).sum()
    losses.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.backward()


def test_tokens_without_a_label_alone_have_no_gradient(single: Mesh) -> None:
    layer = ColumnParallelLinear(H, VOCAB, single, bias=False)
    initialize_parameters(layer, seed=1, mesh=single)
    x = drawn(1, S, B, H).float().requires_grad_()
    targets = torch.full((S, B), IGNORE_INDEX)
    loss = partial(LinearCrossEntropy(5, "forward"), targets=targets, true_vocab=VOCAB)
    layer(x, loss=loss).sum().backward()
    assert x.grad is not None and layer.weight.grad is not None
    assert not x.grad.any() and not layer.weight.grad.any()


def test_losses_without_gradients_save_nothing(single: Mesh) -> None:
    layer = ColumnParallelLinear(H, VOCAB, single, bias=False)
    initialize_parameters(layer, seed=1, mesh=single)
    loss = partial(LinearCrossEntropy(5, "forward"), targets=labels(), true_vocab=VOCAB)
    x = drawn(1, S, B, H).float()
    with torch.no_grad(), Largest() as largest:
        found = layer(x, loss=loss)
    assert not found.requires_grad and largest.elements == 5 * VOCAB
    torch.testing.assert_close(found, layer(x, loss=loss).detach())


@pytest.mark.parametrize("how", ["plain", "biased"])
def test_the_unfused_loss_equals_torch(single: Mesh, how: str) -> None:
    found = step(single, LinearCrossEntropy(3), False, 0.1, how)
    biased = how == "biased"
    layer = ColumnParallelLinear(
        H, VOCAB, single, bias=biased, init=Init("normal", 1.0), dtype=torch.float64
    )
    initialize_parameters(layer, seed=1, mesh=single)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias).data += drawn(4, VOCAB)
    losses = nn.functional.cross_entropy(
        layer(drawn(1, S, B, H)).flatten(0, 1),
        labels().flatten(),
        label_smoothing=0.1,
        reduction="none",
    )
    torch.testing.assert_close(found["losses"].flatten(), losses, rtol=1e-12, atol=1e-12)


class Largest(TorchDispatchMode):
    """Records the largest number of elements of a tensor that an operation creates."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            self.elements = max(self.elements, found.numel())
        return found


@pytest.mark.parametrize(
    ("loss", "rows"),
    [
        (UNFUSED_CROSS_ENTROPY, S * B),
        (LinearCrossEntropy(4), 4),
        (LinearCrossEntropy(4, "forward"), 4),
    ],
)
def test_logits_are_computed_for_one_slice_at_a_time(single: Mesh, loss: Any, rows: int) -> None:
    with Largest() as largest:
        step(single, loss, False, 0.0, "plain", equal=True)
    assert largest.elements == max(rows * PADDED, PADDED * H)


def test_slices_without_tokens_are_refused() -> None:
    with pytest.raises(LayoutError, match="tokens_per_slice=0 is not a number of tokens"):
        LinearCrossEntropy(0)


def test_gradients_of_no_pass_are_refused() -> None:
    with pytest.raises(LayoutError, match="gradients='both' is not 'backward' or 'forward'"):
        LinearCrossEntropy(4, "both")
