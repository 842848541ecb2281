"""Which kernels of torch compute attention where, asked with tensors that have no values."""

from typing import Any

import pytest
import torch
from megatron_kernels import Mask, Scores, attention_backward, attention_forward
from megatron_kernels.ops.attention.call import AttentionCall
from megatron_kernels.ops.attention.flex import flex_unsupported_reason
from megatron_kernels.ops.attention.fused_blocks import fused_unsupported_reason
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Names(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the names of operations of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "scaled_dot_product" in name:
            self.found.append(name.removeprefix("_scaled_dot_product_"))
        return func(*args, **(kwargs or {}))


def heads(
    width: int, dtype: torch.dtype, device: str = "cuda", groups: int = 2, keys: int = 7
) -> tuple[Tensor, Tensor, Tensor]:
    def of(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return of(7, 2, 4, width), of(keys, 2, groups, width), of(keys, 2, groups, width - 2)


@pytest.mark.parametrize(
    ("dtype", "width", "rules", "kernel"),
    [
        (BF16, 64, "causal", "flash"),
        (F16, 256, "full", "flash"),
        (BF16, 264, "causal", "efficient"),
        (F16, 60, "causal", "efficient"),
        (F32, 64, "causal", "efficient"),
    ],
    ids=str,
)
def test_flash_kernels_of_cuda_compute_blocks_in_16_bits_without_a_mask(
    dtype: torch.dtype, width: int, rules: str, kernel: str
) -> None:
    with FakeTensorMode(), Names() as names:
        q, k, v = heads(width, dtype)
        mask = Mask(causal=rules == "causal")
        out, lse = attention_forward(q, k, v, mask, backend="torch")
        expected, found = [f"{kernel}_attention"], ()
        if kernel == "flash":  # the other backward pass copies, which needs a torch with CUDA
            given = torch.empty_like(out), q, k, v, out, lse, mask
            expected.append("flash_attention_backward")
            found = attention_backward(*given, backend="torch")
    assert names.found == expected
    assert (out.shape, lse.shape) == ((7, 2, 4, width - 2), (7, 2, 4))
    assert (out.dtype, lse.dtype) == (dtype, F32)
    for gradient, x in zip(found, (q, k, v), strict=False):
        assert (gradient.shape, gradient.dtype) == (x.shape, dtype)


def test_blocks_that_no_fused_kernel_computes_are_refused() -> None:
    def reason(q: Tensor, k: Tensor, v: Tensor) -> str | None:
        return fused_unsupported_reason(AttentionCall(q, k, v, Mask()))

    with FakeTensorMode():
        assert reason(*heads(16, F32)) is None
        assert reason(*heads(16, F64)) == "CUDA kernels do not support float64"
        assert reason(*heads(16, F64, "cpu")) is None
        assert reason(*heads(16, F32, "meta")) == "needs a CPU or CUDA tensor, q is on meta"
        q, k, v = heads(16, F32, "cpu")
        for empty in ((q[:0], k, v), (q, k[:0], v[:0])):
            assert reason(*empty) == "it does not support empty tensors"
        assert reason(q, k, torch.cat((v, v), -1)) == (
            "value heads of 28 channels are wider than query heads"
        )
        assert reason(q, k, k) is None


def test_flexattention_computes_numbers_of_32_and_16_bits() -> None:
    def reason(q: Tensor, k: Tensor, v: Tensor, scores: Scores = Scores()) -> str | None:  # noqa: B008
        return flex_unsupported_reason(AttentionCall(q, k, v, Mask(), scores))

    with FakeTensorMode():
        for dtype in (F32, F16, BF16):
            assert reason(*heads(16, dtype)) is None and reason(*heads(16, dtype, "cpu")) is None
        message = "needs float32, float16 or bfloat16, q is torch.float64"
        assert reason(*heads(16, F64)) == message
        assert reason(*heads(16, F32, "meta")) == "needs a CPU or CUDA tensor, q is on meta"
        q, k, v = heads(16, F32, "cpu")
        for empty in ((q[:0], k, v), (q, k[:0], v[:0])):
            assert reason(*empty) == "it does not support empty tensors"
        # On a CPU no input may need a gradient, on a GPU any may.
        for given in (Scores(bias=torch.empty(1, 4, 7, 7)), Scores(slopes=torch.empty(4))):
            assert reason(q, k, v, given) is None
            for each in (given.bias, given.slopes):
                if each is not None:
                    each.requires_grad_()
            assert reason(q, k, v, given) == "on a CPU it has no backward pass"
            with torch.no_grad():
                assert reason(q, k, v, given) is None
        on_gpu = [x.requires_grad_() for x in heads(16, F32)]
        assert reason(*on_gpu, Scores(sinks=torch.empty(4, device="cuda"))) is None
