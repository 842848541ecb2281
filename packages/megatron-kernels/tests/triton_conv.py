"""Tests of the Triton kernels of the convolution in Triton's interpreter.

`test_triton_ssm.py` runs them.
"""

from typing import Any

import pytest
import torch
import triton.language as tl
from megatron_kernels import causal_conv
from megatron_kernels.check import check_backend
from megatron_kernels.triton_kernels import causal_conv as kernels_of_conv
from triton_ssm import F64, IDS, LENGTH, both_equal, case


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_convolutions_of_several_tiles_equal_the_reference(
    taps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_of_conv, "_SCANNED", tl.constexpr(16))  # ids that are read at once
    x, weight = torch.randn(LENGTH, 2, 3, dtype=F64), torch.randn(3, taps, dtype=F64)
    state = torch.randn(2, taps - 1, 3, dtype=F64)
    both_equal(causal_conv, [x, weight, None, None, state])
    both_equal(causal_conv, [x, weight, torch.randn(3, dtype=F64), IDS, state])
    both_equal(causal_conv, [x, weight, None, IDS, None], (1,) if taps > 1 else (0,))


def test_convolutions_continue_from_states_shorter_than_the_filter() -> None:
    weight, state = torch.randn(3, 4, dtype=F64), torch.randn(2, 3, 3, dtype=F64)
    for length in (1, 2):
        ids = torch.tensor([[0, 0], [1, -1]])[:, :length]
        both_equal(causal_conv, [torch.randn(length, 2, 3, dtype=F64), weight, None, ids, state])
    both_equal(causal_conv, [torch.randn(2, 2, 3, dtype=F64), weight], (0,))
    one_tap = [torch.randn(5, 2, 3, dtype=F64), weight[:, :1], weight[:, 1]]
    both_equal(causal_conv, one_tap, (0,))
    both_equal(causal_conv, [*one_tap, IDS[:, 18:23]], (0,))


def test_tiles_of_one_sequence_are_shared_by_programs() -> None:
    """Four tiles, of which one program has two."""
    x, weight = torch.randn(60, 1, 2, dtype=F64), torch.randn(2, 2, dtype=F64)
    ids = torch.tensor([[1] * 20 + [2] * 33 + [-1] * 7])
    both_equal(causal_conv, [x, weight, torch.randn(2, dtype=F64), ids])


def test_more_channels_than_a_program_holds() -> None:
    x, weight = torch.randn(5, 1, 131, dtype=F64), torch.randn(131, 3, dtype=F64)
    both_equal(causal_conv, [x, weight, torch.randn(131, dtype=F64)])


def test_check_catches_a_convolution_without_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    true = kernels_of_conv.causal_conv_forward

    def wrong(*given: Any) -> Any:
        return true(*given[:4], None)

    one = case(causal_conv, "state")
    monkeypatch.setattr(kernels_of_conv, "causal_conv_forward", wrong)
    assert not check_backend(one, one.op.backend("triton"), F64, torch.device("cpu")).passed
