"""Dequantized weights equal those of transformers' own functions."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families.case import cases
from families.comparison import text
from families.parity import LIMIT, error, our_logits, our_model
from families.theirs import their_logits, their_model, write
from megatron_ckpt.formats.huggingface import SafetensorsFolder
from megatron_ckpt.formats.quantized import BlockFp8, Mxfp4, QuantizedTensors
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

FILES = ["model.safetensors"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_mxfp4_equals_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(4)
    blocks = torch.randint(256, (3, 5, 4, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 140, (3, 5, 4), dtype=torch.uint8, generator=generator)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    found = QuantizedTensors(SafetensorsFolder(tmp_path, FILES), Mxfp4(), dtype)["w"]
    assert found.shape == (3, 128, 5)
    assert torch.equal(found.to(dtype), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_block_scaled_float8_equals_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(5)
    matrix = torch.randn(24, 32, generator=generator).mul(90).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, generator=generator) + 0.01
    save_file({"w": matrix, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    theirs = Fp8Dequantize(SimpleNamespace())._dequantize_one(matrix, scales, dtype)
    found = QuantizedTensors(
        SafetensorsFolder(tmp_path, ["model.safetensors"]), BlockFp8(8, 16), dtype
    )["w"]
    assert torch.equal(found.to(dtype), theirs)


def test_a_model_with_experts_in_mxfp4_equals_transformers(tmp_path: Path) -> None:
    """The files of gpt-oss: each matrix of experts is stored as blocks and scales."""
    import transformers

    case = cases()["gpt_oss"]
    sizes = {"hidden_size": 64, "intermediate_size": 32}
    folder = write(
        their_model(case, sizes),
        tmp_path,
        quantization_config={"quant_method": "mxfp4"},
        dtype="float32",
    )
    file = folder / "model.safetensors"
    stored = load_file(file)
    generator = torch.Generator().manual_seed(6)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        packed = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        exponents = torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)
        stored |= {f"{name}_blocks": packed, f"{name}_scales": exponents}
    save_file(stored, file, {"format": "pt"})
    config = transformers.Mxfp4Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=config,
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
    ).float()
    tokens = text(150)
    expected = their_logits(theirs.eval(), tokens)
    assert json.loads((folder / "config.json").read_text())["quantization_config"]
    assert error(our_logits(our_model(folder), tokens), expected) <= LIMIT
