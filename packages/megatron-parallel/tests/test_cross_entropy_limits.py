"""Vocab-parallel cross entropy at the ends of a rank's columns, and what it saves and sends."""

import math
from typing import Any

import megatron_parallel.tensor_parallel.cross_entropy as cross_entropy
import pytest
import torch
from megatron_parallel import Mesh, ParallelLayout, vocab_parallel_cross_entropy
from megatron_parallel.tensor_parallel import IGNORE_INDEX
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .test_cross_entropy import Passes

AXES = [Mesh(ParallelLayout(tp=2, dp=1), rank).axis("tp") for rank in range(2)]


class StoppedError(Exception):
    """Raised in place of communication."""


class Recorder:
    """A `LogitsBlock` that records what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], int]] = []

    def forward(self, logits: Tensor, columns: Tensor, valid: int) -> Any:
        self.calls.append((columns.tolist(), valid))
        raise StoppedError

    def backward(self, *_: Any, **__: Any) -> Any:
        raise StoppedError


@pytest.mark.parametrize(
    ("rank", "vocabulary", "targets", "columns", "valid"),
    [
        (0, 7, [0, 3, 4, IGNORE_INDEX], [0, 3, -1, -1], 4),
        (1, 7, [3, 4, 6, 7, 8, IGNORE_INDEX], [-1, 0, 2, -1, -1, -1], 3),
        (1, 8, [7, 8], [3, -1], 4),
        (1, 4, [3, 4], [-1, -1], 0),
        (1, 3, [2, 4, 7], [-1, -1, -1], 0),
    ],
)
def test_a_block_gets_the_columns_of_its_rank(
    rank: int, vocabulary: int, targets: list[int], columns: list[int], valid: int
) -> None:
    """Each of two ranks has 4 columns, with padding at the end."""
    block = Recorder()
    logits = torch.zeros(len(targets), 4)
    with pytest.raises(StoppedError):
        vocab_parallel_cross_entropy(
            logits, torch.tensor(targets), AXES[rank], vocabulary, block=block
        )
    assert block.calls == [(columns, valid)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compiles", [False, True])
def test_compiled_code_saves_logits_in_16_bits_and_other_code_saves_probabilities(
    single: Mesh, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, compiles: bool
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiles)
    logits = torch.linspace(-1, 1, 32).view(4, 8).to(dtype).requires_grad_()
    saved: list[Tensor] = []

    def save(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with saved_tensors_hooks(save, lambda t: t):
        vocab_parallel_cross_entropy(logits, torch.arange(4), single.axis("tp"), 8)
    (large,) = (t for t in saved if t.numel() == logits.numel())
    again = compiles and dtype == torch.bfloat16
    assert large.dtype == (torch.bfloat16 if again else torch.float32)
    assert (large.data_ptr() == logits.data_ptr()) == again


@pytest.mark.parametrize("compiles", [False, True])
def test_padding_has_no_gradient_if_the_vocabulary_is_as_long_as_the_sequence(
    single: Mesh, monkeypatch: pytest.MonkeyPatch, compiles: bool
) -> None:
    """5 samples of 5 tokens, 5 words and 3 columns of padding, all with probability 1 / 5."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiles)
    dtype = torch.bfloat16 if compiles else torch.float64
    logits = torch.zeros(5, 5, 8, dtype=dtype, requires_grad=True)
    losses = vocab_parallel_cross_entropy(
        logits, torch.arange(5).expand(5, 5), single.axis("tp"), 5
    )
    torch.testing.assert_close(losses, torch.full_like(losses, math.log(5)))
    losses.sum().backward()
    assert logits.grad is not None and not logits.grad[..., 5:].any()
    expected = (0.2 - torch.eye(5)).to(dtype).expand(5, 5, 5)
    torch.testing.assert_close(logits.grad[..., :5], expected)


def test_bounded_logits_are_overwritten_and_not_copied(single: Mesh) -> None:
    logits = torch.linspace(-1, 1, 16 * 64).view(16, 64)
    for overwrites in (False, True):
        with Passes(logits.numel()) as passes:
            vocab_parallel_cross_entropy(
                logits,
                torch.arange(16),
                single.axis("tp"),
                64,
                softcap=0.5,
                overwrites=overwrites,
            )
        # The quotient, its tangent, and the product.
        assert passes.allocations == 3


def test_one_rank_sends_nothing(single: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "all_reduce", None)
    loss = vocab_parallel_cross_entropy(
        torch.zeros(1, 4), torch.tensor([1]), single.axis("tp"), 4, label_smoothing=0.1
    )
    assert loss.item() == pytest.approx(math.log(4))


@pytest.mark.parametrize("compiles", [False, True])
def test_maxima_that_may_lose_nan_need_no_further_operation(
    monkeypatch: pytest.MonkeyPatch, compiles: bool
) -> None:
    """A NaN of a rank is in the sum of exponentials, which keeps it."""
    calls: list[tuple[str, bool]] = []

    def reduce(
        t: Tensor, axis: Any, op: str = "sum", *, purpose: str, keeps_nan: bool = True
    ) -> Tensor:
        calls.append((op, keeps_nan or op == "sum"))
        return t

    monkeypatch.setattr(cross_entropy, "all_reduce", reduce)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiles)
    logits = torch.zeros(2, 4)
    logits[1, 3] = torch.nan
    losses = vocab_parallel_cross_entropy(logits, torch.tensor([0, 0]), AXES[0], 8)
    assert losses[0].isfinite() and losses[1].isnan()
    assert calls == [("max", False)] * (2 if compiles else 1) + [("sum", True)]
