"""Tests of the Triton kernels of the scan in Triton's interpreter.

`test_triton_ssm.py` runs them. Chunks are of 16 tokens, so that short sequences have several.
"""

from typing import Any

import pytest
import torch
from megatron_kernels import KernelError, causal_conv, ssd_scan
from megatron_kernels.case import Case
from megatron_kernels.cases import CASES
from megatron_kernels.check import check_backend
from megatron_kernels.ops.ssm import triton_scan
from megatron_kernels.registry import Op
from megatron_kernels.triton_kernels import ssd_backward as kernels_of_scan
from megatron_kernels.triton_kernels import ssd_step as kernels_of_step
from megatron_kernels.triton_kernels.ssd_parts import TILINGS
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

pytestmark = pytest.mark.sampled(4)

F64 = torch.float64
CHUNK = 16
LENGTH = 37
IDS = torch.tensor([[3] * 5 + [9] * 11 + [2] * 7 + [3] * 14, [0] * 20 + [1] * 9 + [-1] * 8])
"""Documents that end inside chunks, at the end of one, and before padding."""


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    monkeypatch.setattr(triton_scan, "_chunk", lambda *_: CHUNK)
    monkeypatch.setitem(TILINGS, (4, CHUNK), TILINGS[4, 32])


def inputs_of_scan(length: int = LENGTH, heads: int = 2, groups: int = 1) -> list[Tensor | None]:
    """Returns all tensors of a call; all but the rates require gradients after `leaves`."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=F64)

    found = [draw(length, 2, heads, 3), draw(length, 2, heads), -draw(heads).exp()]
    found += [draw(length, 2, groups, 5), draw(length, 2, groups, 5), draw(heads), draw(heads)]
    return [*found, None, draw(2, heads, 3, 5)]


def outcomes(
    op: Op[..., Any], backend: str, given: list[Any], parts: tuple[int, ...] = (0, 1)
) -> list[Tensor]:
    """Returns outputs, and gradients of a weighted sum of some of them."""
    leaves = [
        each.detach().requires_grad_()
        if isinstance(each, Tensor) and each.is_floating_point()
        else each
        for each in given
    ]
    found = op.run(backend, *leaves)
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    used = [found[part] for part in parts]
    weights = [
        followed_by_nan(torch.linspace(-1, 2, out.numel(), dtype=F64).view(out.shape))
        for out in used
    ]
    return [*found, *torch.autograd.grad(used, wanted, weights, materialize_grads=True)]


def followed_by_nan(x: Tensor) -> Tensor:
    """Returns the numbers in memory that goes on with NaN, which nothing may read."""
    return torch.cat((x, torch.full_like(x, torch.nan)))[: len(x)]


def both_equal(
    op: Op[..., Any], given: list[Any], parts: tuple[int, ...] = (0, 1), error: float = 1e-11
) -> None:
    """Compares values and gradients of the kernels with those of the reference."""
    found, expected = (outcomes(op, name, given, parts) for name in ("triton", "reference"))
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-11, atol=error)


@pytest.mark.slow
@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, LENGTH])
def test_scans_of_any_length_equal_the_recurrence(length: int) -> None:
    both_equal(ssd_scan, inputs_of_scan(length))


@pytest.mark.parametrize(
    ("heads", "groups"), [pytest.param(2, 1, marks=pytest.mark.slow), (4, 2)], ids=["one", "two"]
)
def test_documents_that_end_in_chunks_equal_the_recurrence(heads: int, groups: int) -> None:
    given = inputs_of_scan(heads=heads, groups=groups)
    given[7] = IDS
    both_equal(ssd_scan, given)


def test_steps_have_limits_and_no_gradient_beyond() -> None:
    both_equal(ssd_scan, [*inputs_of_scan(7), 4, (0.4, 0.9)])


@pytest.mark.parametrize(
    "part", [pytest.param(0, marks=pytest.mark.slow), 1], ids=["outputs", "last state"]
)
def test_one_output_alone_has_gradients(part: int) -> None:
    given = inputs_of_scan(CHUNK + 3, heads=4)  # two programs for the heads of a group
    given[5] = given[6] = given[8] = None
    both_equal(ssd_scan, given, (part,))


def test_more_heads_than_a_program_of_steps_holds() -> None:
    x, dt = torch.randn(3, 1, 33, 2, dtype=F64), torch.randn(3, 1, 33, dtype=F64)
    b, c = (torch.randn(3, 1, 1, 2, dtype=F64) for _ in range(2))
    rates, bias = -torch.rand(33, dtype=F64), torch.randn(33, dtype=F64)
    both_equal(ssd_scan, [x, dt, rates, b, c, None, bias, None, None])


def test_states_of_several_tiles_equal_the_recurrence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of 17 x 18 numbers in tiles of 16 x 16."""
    monkeypatch.setitem(TILINGS, (4, CHUNK), TILINGS[4, CHUNK]._replace(width=16))
    x, dt = torch.randn(CHUNK + 1, 1, 1, 17, dtype=F64), torch.randn(CHUNK + 1, 1, 1, dtype=F64)
    b, c = (torch.randn(CHUNK + 1, 1, 1, 18, dtype=F64) for _ in range(2))
    state = torch.randn(1, 1, 17, 18, dtype=F64)
    rate = -torch.ones(1, dtype=F64)
    both_equal(ssd_scan, [x, dt, rate, b, c, None, None, None, state])


def test_strong_decays_and_long_steps_give_no_nan() -> None:
    """Logarithms reach -1e5 in a chunk: the inverse of their exponential is no number."""
    given = inputs_of_scan(CHUNK + 3)
    assert given[1] is not None and given[2] is not None
    given[1], given[2] = 300 * given[1], 40 * given[2]
    given[7] = IDS[:, : CHUNK + 3]
    both_equal(ssd_scan, given, error=1e-8)


def test_one_token_without_gradients_is_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_scan, "_FORWARD", None)
    monkeypatch.setattr(kernels_of_step, "_ELEMENTS", 16)  # two channels of a state at a time
    given = inputs_of_scan(1, heads=4, groups=2)
    for ids in (None, torch.tensor([[4], [-1]])):
        for state in (given[8], None):
            call = [*given[:7], ids, state, 8, (0.01, 2.0)]
            with torch.no_grad():
                found, expected = (ssd_scan.run(name, *call) for name in ("triton", "reference"))
            for ours, exact in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


def test_a_scan_saves_its_inputs_and_the_states_before_chunks() -> None:
    saved: list[Tensor] = []
    given = [None if x is None else x.requires_grad_() for x in inputs_of_scan()]

    def keep(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        ssd_scan.run("triton", *given)
    chunks = -(-LENGTH // CHUNK)
    known = sum(x.numel() for x in given if x is not None)
    assert given[0] is not None and given[1] is not None and given[8] is not None
    assert sum(x.numel() for x in saved) == known + chunks * given[8].numel() + 2 * given[1].numel()


def test_views_of_a_projection_are_read_in_place() -> None:
    fused = followed_by_nan(torch.randn(CHUNK + 3, 2, 2 * 3 + 5 + 5 + 2, dtype=F64))
    x, b, c, dt = fused.split((6, 5, 5, 2), -1)
    given = inputs_of_scan(CHUNK + 3)
    given[0] = x.unflatten(2, (2, 3))
    given[1], given[3], given[4] = dt, b[:, :, None], c[:, :, None]
    both_equal(ssd_scan, given)
    both_equal(causal_conv, [x, torch.randn(6, 4, dtype=F64)])


def case(op: Op[..., Any], label: str) -> Case:
    return next(each for each in CASES if each.op is op and each.label == label)


def test_check_catches_a_backward_pass_without_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    true = kernels_of_scan.ssd_backward

    def wrong(*given: Any) -> Any:
        return true(*given[:9], None, *given[10:])

    one = case(ssd_scan, "documents and state")
    monkeypatch.setattr(kernels_of_scan, "ssd_backward", wrong)
    result = check_backend(one, one.op.backend("triton"), F64, torch.device("cpu"))
    assert result.error < 1e-12 and not result.passed


def test_unsupported_calls_have_exact_reasons() -> None:
    given = inputs_of_scan(3)
    assert given[0] is not None and given[3] is not None and given[8] is not None
    wide = torch.zeros(3, 2, 1, 129, dtype=F64)
    for changes, reason in (
        ({3: given[3].float()}, "x is torch.float64, b torch.float32 and c torch.float64"),
        (
            {3: wide, 4: wide},
            "heads or states of 129 channels are wider than 128, the most in torch.float64",
        ),
        ({0: given[0][:0]}, "there are no tokens, heads or channels"),
    ):
        call = [changes.get(number, each) for number, each in enumerate(given)]
        with pytest.raises(KernelError, match=f"cannot use backend triton: {reason}"):
            ssd_scan.run("triton", *call)
    with pytest.raises(KernelError, match="filters of 17 taps are longer than 16"):
        causal_conv(torch.zeros(3, 1, 2), torch.zeros(2, 17), backend="triton")
