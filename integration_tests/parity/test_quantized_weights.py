"""Dequantized weights equal those of transformers' own functions."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron_ckpt.formats.huggingface import SafetensorsFolder
from megatron_ckpt.formats.quantized import BlockFp8, Mxfp4, QuantizedTensors
from safetensors.torch import save_file

pytest.importorskip("transformers")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_mxfp4_equals_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(4)
    blocks = torch.randint(256, (3, 5, 4, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 140, (3, 5, 4), dtype=torch.uint8, generator=generator)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    found = QuantizedTensors(SafetensorsFolder(tmp_path), Mxfp4(), dtype)["w"]
    assert found.shape == (3, 128, 5) and found.dtype == dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_block_scaled_float8_equals_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(5)
    matrix = torch.randn(24, 32, generator=generator).mul(90).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, generator=generator) + 0.01
    save_file({"w": matrix, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    theirs = Fp8Dequantize(SimpleNamespace())._dequantize_one(matrix, scales, dtype)
    found = QuantizedTensors(SafetensorsFolder(tmp_path), BlockFp8(8, 16), dtype)["w"]
    assert found.dtype == theirs.dtype == dtype
    assert torch.equal(found, theirs)
