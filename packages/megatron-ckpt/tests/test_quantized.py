"""Block-scaled float8 and MXFP4 weights are read as the values that they stand for."""

import json

import pytest
import torch
from fuzzing import fuzz, mutate_json
from megatron_ckpt import Checkpoint, CheckpointError, ForeignModel, View, export_hf, import_hf
from megatron_ckpt.formats.huggingface import SafetensorsFolder, open_folder
from megatron_ckpt.formats.quantized import BlockFp8, Mxfp4, QuantizedTensors, find_scheme
from megatron_ckpt.views import Box
from safetensors.torch import load_file, save_file

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [3, 4]}}


def fp8(rows=7, columns=10):
    """Returns a matrix in float8, its scales for blocks of 3 x 4, and their product in float64."""
    torch.manual_seed(2)
    matrix = torch.randn(rows, columns).mul(50).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // 3), -(-columns // 4)) + 0.01
    product = torch.zeros(rows, columns, dtype=torch.float64)
    for i in range(rows):
        for j in range(columns):
            product[i, j] = matrix[i, j].double() * scales[i // 3, j // 4].double()
    return matrix, scales, product


def mxfp4(experts=2, out=3, blocks=2):
    """Returns bytes, exponents and the matrices ``[e, in, out]`` of float64 that they stand for."""
    torch.manual_seed(3)
    packed = torch.randint(256, (experts, out, blocks, 16), dtype=torch.uint8)
    exponents = torch.randint(120, 134, (experts, out, blocks), dtype=torch.uint8)
    values = torch.zeros(experts, blocks * 32, out, dtype=torch.float64)
    for e in range(experts):
        for n in range(out):
            for k in range(blocks * 32):
                byte = int(packed[e, n, k // 32, k % 32 // 2])
                bits = byte >> 4 if k % 2 else byte & 15
                sign = -1 if bits & 8 else 1
                values[e, k, n] = (
                    sign * E2M1[bits & 7] * 2.0 ** (int(exponents[e, n, k // 32]) - 127)
                )
    return packed, exponents, values


def opened(tmp_path, tensors, scheme, dtype=torch.float32):
    save_file(tensors, tmp_path / "model.safetensors")
    return QuantizedTensors(SafetensorsFolder(tmp_path, ["model.safetensors"]), scheme, dtype)


def every_box(shape):
    """Yields boxes that start and end inside blocks."""
    for cut in range(1, 6):
        offsets = tuple(min(extent - 1, cut * 7 % extent) for extent in shape)
        yield Box(offsets, tuple(e - o for e, o in zip(shape, offsets, strict=True)))
        yield Box((0,) * len(shape), tuple(max(1, extent - cut) for extent in shape))


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_tensors_and_boxes_hold_the_values_by_definition(tmp_path, kind):
    if kind == "fp8":
        matrix, scales, expected = fp8()
        stored, scheme = {"w": matrix, "w_scale_inv": scales}, BlockFp8(3, 4)
    else:
        packed, exponents, expected = mxfp4()
        stored, scheme = {"w_blocks": packed, "w_scales": exponents}, Mxfp4()
    source = opened(tmp_path, stored | {"bias": torch.ones(3)}, scheme)
    assert sorted(source) == ["bias", "w"] and len(source) == 2
    assert source.meta()["w"].shape == expected.shape
    assert torch.equal(source["bias"], torch.ones(3))
    torch.testing.assert_close(source["w"].double(), expected, rtol=1e-7, atol=0)
    for box in every_box(expected.shape):
        inside = tuple(slice(a, b) for a, b in zip(box.offsets, box.ends, strict=True))
        assert torch.equal(source.box("w", box), source["w"][inside])


def test_scales_may_be_powers_of_two_in_float8(tmp_path):
    """DeepSeek's ``scale_fmt`` ``ue8m0``: a byte x stands for 2^(x - 127)."""
    matrix, _, _ = fp8()
    exponents = torch.tensor([[120, 127, 130], [0, 126, 133], [128, 119, 127]], dtype=torch.uint8)
    scales = exponents.view(torch.float8_e8m0fnu)
    source = opened(tmp_path, {"w": matrix, "w_scale_inv": scales}, BlockFp8(3, 4))
    powers = 2.0 ** (exponents.double() - 127)
    expected = matrix.double() * powers.repeat_interleave(3, 0).repeat_interleave(4, 1)[:7, :10]
    assert torch.equal(source["w"].double(), expected)
    box = Box((4, 5), (3, 4))
    assert torch.equal(source.box("w", box).double(), expected[4:7, 5:9])


def test_blocks_and_scales_of_experts_may_have_the_dtypes_of_their_bits(tmp_path):
    packed, exponents, expected = mxfp4()
    stored = {
        "w_blocks": packed.view(torch.float4_e2m1fn_x2),
        "w_scales": exponents.view(torch.float8_e8m0fnu),
    }
    source = opened(tmp_path, stored, Mxfp4())
    assert torch.equal(source["w"].double(), expected)
    box = Box((1, 20, 1), (1, 30, 2))
    assert torch.equal(source.box("w", box).double(), expected[1:2, 20:50, 1:3])


def test_a_tensor_of_four_bits_without_scales_is_named(toy, folder, tmp_path):
    weights = load_file(folder / "model.safetensors")
    shape = weights["net.0.a"].shape
    weights["net.0.a"] = torch.zeros(*shape, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'net\.0\.a' is stored in four bits"):
        import_hf(folder, tmp_path / "run")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_quantized_weights_are_rounded_once_to_the_requested_dtype(toy, folder, tmp_path, dtype):
    """A folder of bfloat16 weights in float8 has products that bfloat16 does not hold."""
    file, weights = folder / "config.json", folder / "model.safetensors"
    file.write_text(json.dumps(json.loads(file.read_text()) | FP8 | {"dtype": "bfloat16"}))
    matrix, scales, product = fp8()
    stored = load_file(weights) | {"net.0.a": matrix, "net.0.a_scale_inv": scales}
    save_file(stored | {"net.0.b": torch.zeros(7, 10)}, weights)
    toy.config_from_hf = known_fields(toy.config_from_hf)
    found = Checkpoint(import_hf(folder, tmp_path / "run", dtype=dtype)).read_tensor("layers.0.w")
    assert found.dtype == dtype
    assert torch.equal(found[:7], product.float().to(dtype))
    assert dtype == torch.bfloat16 or not torch.equal(found, found.bfloat16().to(dtype))
    part = torch.empty(14, 10, dtype=dtype)
    view = View(part, (14, 10), (0, 0), (14, 10))
    ForeignModel(folder).load_tensors({"layers.0.w": [view]}, cast="floating")
    assert torch.equal(part, found)


def test_only_the_needed_blocks_are_read(tmp_path, monkeypatch):
    packed, exponents, _ = mxfp4(blocks=4)
    source = opened(tmp_path, {"w_blocks": packed, "w_scales": exponents}, Mxfp4())
    read, box = [], SafetensorsFolder.box

    def counted(folder, name, part):
        read.append((name, part.lengths))
        return box(folder, name, part)

    monkeypatch.setattr(SafetensorsFolder, "box", counted)
    source.box("w", Box((1, 40, 0), (1, 20, 2)))
    assert read == [("w_blocks", (1, 2, 1, 16)), ("w_scales", (1, 2, 1))]


def test_a_quantized_model_is_imported_and_exported_without_quantization(toy, folder, tmp_path):
    toy.config_from_hf = known_fields(toy.config_from_hf)
    file, weights = folder / "config.json", folder / "model.safetensors"
    settings = json.loads(file.read_text()) | FP8 | {"dtype": "float32"}
    file.write_text(json.dumps(settings))
    matrix, scales, product = fp8()
    stored = load_file(weights) | {"net.0.a": matrix, "net.0.a_scale_inv": scales}
    stored["net.0.b"] = torch.randn(7, 10)
    save_file(stored, weights)
    checkpoint = Checkpoint(import_hf(folder, tmp_path / "run"))
    found = checkpoint.read_tensor("layers.0.w")
    torch.testing.assert_close(found[:7].double(), product, rtol=1e-7, atol=0)
    assert torch.equal(found[7:], stored["net.0.b"])
    part = torch.empty(3, 4)
    view = View(part, (14, 10), (2, 3), (3, 4))
    ForeignModel(folder).load_tensors({"layers.0.w": [view]})
    assert torch.equal(part, found[2:5, 3:7])
    back = export_hf(checkpoint, tmp_path / "back")
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    assert torch.equal(load_file(back / "model.safetensors")["net.0.a"], found[:7])
    file.write_text(json.dumps(settings | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(CheckpointError, match="quantization_config"):
        import_hf(folder, tmp_path / "other")


def known_fields(read):
    """Returns a reader of settings that refuses `quantization_config`, as families do."""

    def checked(values):
        if "quantization_config" in values:
            raise ValueError(f"quantization_config = {values['quantization_config']}")
        return read(values)

    return checked


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w_scale_inv": torch.ones(3, 3)}, "'w' is quantized, but 'w' is missing"),
        ({"w": fp8()[0], "w_scale_inv": torch.ones(2, 3)}, r"shape \(2, 3\), expected \(3, 3\)"),
        ({"w": fp8()[0], "v": torch.ones(2)}, "'w' is in float8_e4m3fn and has no 'w_scale_inv'"),
        ({"w": torch.ones(3), "w_scale_inv": torch.ones(1)}, r"shape is \(3,\), not that of a"),
    ],
)
def test_parts_that_do_not_fit_are_named(tmp_path, tensors, message):
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path, tensors, BlockFp8(3, 4))


def test_blocks_and_scales_that_do_not_fit_are_named(tmp_path):
    stored = {"w_blocks": torch.ones(2, 3, 2, 8, dtype=torch.uint8)}
    stored["w_scales"] = torch.ones(2, 3, 2, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"expected \[e, n, k, 16\] and \[e, n, k\]"):
        opened(tmp_path, stored, Mxfp4())


def test_other_methods_are_left_to_the_family():
    for given in (None, {"quant_method": "awq"}, {"quant_method": "fp8"}, "fp8", {}):
        assert find_scheme({"quantization_config": given}, "config.json") is None
    assert find_scheme(FP8, "config.json") == BlockFp8(3, 4)
    for size in ([128], [0, 1], "128", [1.5, 2], [True, 2]):
        wrong = {"quantization_config": {"quant_method": "fp8", "weight_block_size": size}}
        with pytest.raises(
            CheckpointError, match=r"config.json: .*weight_block_size = .*\[128, 128\]"
        ):
            find_scheme(wrong, "config.json")


def test_damaged_settings_are_read_or_refused(tmp_path, fuzz_count):
    file = tmp_path / "config.json"
    matrix, scales, _ = fp8()
    save_file({"w": matrix, "w_scale_inv": scales}, tmp_path / "model.safetensors")

    def read(content):
        file.write_bytes(content)
        tensors = open_folder(tmp_path).open_tensors("", {})
        for name in tensors:
            tensors[name]

    seeds = [json.dumps({**FP8, "dtype": "float32"}).encode()]
    fuzz(read, seeds, CheckpointError, count=fuzz_count, mutate=mutate_json)
