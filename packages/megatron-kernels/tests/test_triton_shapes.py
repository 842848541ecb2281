"""What calls of the Triton backends return and save, asked with tensors that have no values.

Neither Triton nor a GPU is needed, as on an imagined device.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron_kernels import (
    DropoutSite,
    Mask,
    add_layer_norm,
    add_rms_norm,
    attention,
    bias_dropout_add,
    bias_gelu,
    bias_swiglu,
    causal_conv,
    cross_entropy,
    gelu,
    glu,
    layer_norm,
    pointwise,
    rms_norm,
    rope,
    rope_qkv,
    softmax,
    ssd_scan,
    swiglu,
    vocab_embedding,
)
from megatron_kernels._compat import has_gpu
from megatron_kernels.availability import library, probe_installation
from megatron_kernels.case import Case
from megatron_kernels.cases import CASES
from megatron_kernels.inputs import InputGenerator
from megatron_kernels.ops import triton_op
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

CPU = torch.device("cpu")
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
TRITON = [case for case in CASES if any(b.name == "triton" for b in case.op.backends)]
NAMES = list(dict.fromkeys(case.op.name for case in TRITON))


@pytest.fixture(autouse=True)
def _on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_op, "interprets", lambda: True)


def described(case: Case, backend: str, dtype: torch.dtype) -> list[tuple[torch.Size, torch.dtype]]:
    """Returns shapes and dtypes of outputs and gradients."""
    arguments = case.arguments(InputGenerator(dtype, CPU))
    found = case.op(*arguments, backend=backend)
    outputs = found if isinstance(found, tuple) else (found,)
    leaves = [x for x in arguments if isinstance(x, Tensor) and x.requires_grad]
    followed = [x for x in outputs if x.requires_grad]
    gradients: tuple[Tensor, ...] = ()
    if followed:
        gradients = torch.autograd.grad(followed, leaves, [torch.ones_like(x) for x in followed])
    return [(x.shape, x.dtype) for x in (*outputs, *gradients)]


@pytest.mark.parametrize("name", NAMES)
def test_tensors_without_values_have_the_shapes_and_dtypes_of_the_reference(name: str) -> None:
    for case in (each for each in TRITON if each.op.name == name):
        for dtype in (BF16, F64):
            with FakeTensorMode(allow_non_fake_inputs=True):
                found = described(case, "triton", dtype)
            assert found == described(case, "reference", dtype), case.label


def of(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=dtype.is_floating_point)


STREAM, TABLES, HEADS = (5, 3, 8), (5, 1, 2), (5, 3, 4, 8)
SITE = DropoutSite(0, 0, 0, 2.0)
STREAM_BYTES, ROW_BYTES, GAIN_BYTES = 2 * 5 * 3 * 8, 4 * 5 * 3, 2 * 8
SAVED: dict[str, tuple[Callable[[], Any], int]] = {
    # The stream or its sum, the gain, and one number for each row; LayerNorm has two.
    "rms_norm": (
        lambda: rms_norm(of(*STREAM), of(8), backend="triton"),
        STREAM_BYTES + GAIN_BYTES + ROW_BYTES,
    ),
    "layer_norm": (
        lambda: layer_norm(of(*STREAM), of(8), of(8), backend="triton"),
        STREAM_BYTES + GAIN_BYTES + 2 * ROW_BYTES,
    ),
    "add_rms_norm": (
        lambda: add_rms_norm(of(*STREAM), of(*STREAM), None, backend="triton"),
        STREAM_BYTES + ROW_BYTES,
    ),
    "add_layer_norm": (
        lambda: add_layer_norm(of(*STREAM), of(*STREAM), of(8), of(8), backend="triton"),
        STREAM_BYTES + GAIN_BYTES + 2 * ROW_BYTES,
    ),
    # Activations save their input and the bias.
    "gelu": (lambda: gelu(of(*STREAM), backend="triton"), STREAM_BYTES),
    "pointwise": (lambda: pointwise(of(*STREAM), "silu", backend="triton"), STREAM_BYTES),
    "glu": (lambda: glu(of(5, 2, 8), "gelu", backend="triton"), 2 * 5 * 2 * 8),
    "swiglu": (lambda: swiglu(of(5, 2, 8), backend="triton"), 2 * 5 * 2 * 8),
    "bias_gelu": (
        lambda: bias_gelu(of(*STREAM), of(8), backend="triton"),
        STREAM_BYTES + GAIN_BYTES,
    ),
    "bias_swiglu": (
        lambda: bias_swiglu(of(5, 2, 8), of(2, 8), backend="triton"),
        2 * (5 * 2 * 8 + 2 * 8),
    ),
    "softmax": (lambda: softmax(of(5, 7), backend="triton"), 2 * 5 * 7),  # its result
    # Tables, and nothing that is rotated.
    "rope": (
        lambda: rope(of(*HEADS), *(of(*TABLES, dtype=F32) for _ in range(2)), backend="triton"),
        2 * 4 * 5 * 2,
    ),
    "rope_qkv": (
        lambda: rope_qkv(
            of(5, 3, 2, 4, 8), *(of(*TABLES, dtype=F32) for _ in range(2)), backend="triton"
        ),
        2 * 4 * 5 * 2,
    ),
    # Logits, targets, and one number for each row.
    "cross_entropy": (
        lambda: cross_entropy(of(5, 9), of(5, dtype=torch.int64), backend="triton"),
        2 * 5 * 9 + 8 * 5 + 4 * 5,
    ),
    "vocab_embedding": (
        lambda: vocab_embedding(of(9, 8), of(5, 3, dtype=torch.int64), backend="triton"),
        8 * 5 * 3,
    ),
    "bias_dropout_add": (  # the key of each token
        lambda: bias_dropout_add(
            of(*STREAM),
            None,
            of(*STREAM),
            *(of(5, 3, dtype=torch.int32) for _ in range(2)),
            SITE,
            backend="triton",
        ),
        2 * 4 * 5 * 3,
    ),
    "attention": (  # queries, keys and values of two groups, the output, and its log-sum-exp
        lambda: attention(
            of(*HEADS), *(of(6, 3, 2, 8) for _ in range(2)), Mask(causal=False), backend="triton"
        ),
        2 * (2 * 5 * 3 * 4 * 8 + 2 * 6 * 3 * 2 * 8) + 4 * 3 * 4 * 5,
    ),
    "causal_conv": (
        lambda: causal_conv(of(*STREAM), of(8, 4), of(8), backend="triton"),
        STREAM_BYTES + 2 * 8 * 4 + GAIN_BYTES,
    ),
    # Inputs, the states before two chunks of 64 tokens, and two numbers for each token and head.
    "ssd_scan": (
        lambda: ssd_scan(
            of(65, 3, 4, 8), of(65, 3, 4), of(4), *(of(65, 3, 2, 5) for _ in range(2)),
            backend="triton",
        ),
        2 * (65 * 3 * 4 * 8 + 65 * 3 * 4 + 4 + 2 * 65 * 3 * 2 * 5)
        + 2 * (2 * 3 * 4 * 8 * 5)
        + 2 * (4 * 65 * 3 * 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAVED)
def test_a_call_saves_what_its_description_says(name: str) -> None:
    run, expected = SAVED[name]
    saved: dict[int, Tensor] = {}
    with (
        FakeTensorMode(),
        saved_tensors_hooks(lambda x: saved.setdefault(id(x), x), lambda x: x),
    ):
        run()
    assert sum(x.numel() * x.element_size() for x in saved.values()) == expected


def test_a_gpu_without_a_driver_or_triton_is_a_reason_for_tensors_with_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tensor that claims to be on CUDA passes the check of the device."""

    class OnCuda(Tensor):
        is_cuda = True

    monkeypatch.setattr(triton_op, "interprets", lambda: False)
    triton_op._usability.cache_clear()
    missing = probe_installation(library("triton")).reason
    expected = (
        f"triton is {missing}" if missing else None if has_gpu() else "the driver finds no GPU"
    )
    found = triton_op.unsupported_reason(None, torch.ones(2).as_subclass(OnCuda))
    triton_op._usability.cache_clear()
    assert found == expected


VIEWS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "columns": (lambda x: x[0, 0, :, 0, :6], True),
    "heads of a projection": (lambda x: x[..., 2, :], True),
    "a group of heads": (lambda x: x[:, 1:, :, 0], False),  # rows at two distances
    "single channels": (lambda x: x[0, 0, 0].mT[:, :1], True),
    "channels apart": (lambda x: x[0, 0, 0].mT, False),
}


@pytest.mark.parametrize("name", VIEWS)
def test_norms_read_rows_at_equal_distances_in_place(name: str) -> None:
    view, in_place = VIEWS[name]
    saved: list[Tensor] = []
    with FakeTensorMode(), saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        x = view(torch.empty(3, 2, 5, 4, 8)).requires_grad_()
        rms_norm(x, None, backend="triton")
    (own,) = (each for each in saved if each.shape == x.shape)
    assert (own.stride() == x.stride()) is in_place


def test_only_a_last_dim_that_is_not_contiguous_is_copied() -> None:
    x = torch.ones(3, 4)
    for view in (x, x[::2], x[:, :2], x[None]):
        assert triton_op.contiguous_rows(view) is view
    copy = triton_op.contiguous_rows(x.t())
    assert copy.stride() == (3, 1) and torch.equal(copy, x.t())


@pytest.mark.parametrize(
    ("dtype", "width", "tokens", "stored"),
    [
        (BF16, 128, 64, BF16),
        (BF16, 129, 32, BF16),
        (torch.float16, 8, 32, F32),
        (F32, 128, 32, F32),
        (F64, 8, 32, F64),
    ],
)
def test_a_chunk_has_as_many_tokens_as_leave_room_for_its_tiles(
    dtype: torch.dtype, width: int, tokens: int, stored: torch.dtype
) -> None:
    saved: list[Tensor] = []
    for length, chunks in ((tokens, 1), (tokens + 1, 2)):
        for of_x, of_b in ((width, 5), (5, width)):
            saved.clear()
            with FakeTensorMode(), saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
                x, b = of(length, 1, 2, of_x, dtype=dtype), of(length, 1, 1, of_b, dtype=dtype)
                ssd_scan(x, of(length, 1, 2, dtype=dtype), of(2), b, b, backend="triton")
            (states,) = (x for x in saved if x.dim() == 5)
            assert states.shape == (chunks, 1, 2, of_x, of_b) and states.dtype == stored
