"""Tables of constants against torch, and limits of the lengths of messages."""

import pytest
import torch
from megatron_ckpt import CheckpointError
from megatron_ckpt.dtypes import DTYPES, dtype_name, is_floating, item_size, torch_dtype
from megatron_ckpt.errors import adapter_hint, did_you_mean, shorten


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_are_those_of_torch(name):
    dtype = torch_dtype(name)
    assert (item_size(name), is_floating(name)) == (dtype.itemsize, dtype.is_floating_point)
    assert dtype_name(dtype) == name
    letters, _, _ = name.partition("_")
    assert letters in ("BOOL", f"{letters.rstrip('0123456789')}{8 * dtype.itemsize}")


def test_a_dtype_that_the_format_lacks_is_refused():
    with pytest.raises(CheckpointError, match="dtype complex128 cannot be stored"):
        dtype_name(torch.complex128)


def test_the_middle_of_a_long_message_is_left_out():
    assert str(CheckpointError("a" * 1500)) == "a" * 1500
    long = "a" * 1000 + "b" * 101 + "c" * 400
    assert str(CheckpointError(long)) == f"{'a' * 1000} ... {'c' * 400}"


def test_foreign_text_becomes_one_line_of_at_most_300_characters():
    assert shorten("one\n  two") == "one two"
    assert shorten("x" * 300) == "x" * 300
    assert shorten("x" * 301) == "x" * 297 + "..."


def test_the_nearest_name_is_shown_if_half_of_it_fits():
    assert did_you_mean("layers.0.bias", ["layers.0.weight", "layers.0.bais"]) == (
        " (nearest: 'layers.0.bais')"
    )
    assert did_you_mean("abcd", ["abzz"]) == " (nearest: 'abzz')"  # 2 * 2 of 8 letters
    assert did_you_mean("abcd", ["azzz"]) == ""


def test_an_adapter_is_a_tensor_beside_a_weight():
    known = {"layers.0.qkv.weight", "weight"}
    assert "layer 'layers.0.qkv' has more" in adapter_hint("layers.0.qkv.lora_a", known)
    for name in ("layers.0.qkv.bias", "layers.1.qkv.lora_a", "lora_a"):
        assert adapter_hint(name, known) == ""
