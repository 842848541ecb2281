"""Models of other formats without a checkpoint: parts of tensors, names, and settings of files."""

import json
import os

import pytest
import torch
from megatron_ckpt import CheckpointError, CheckpointStore, ForeignModel, View
from megatron_ckpt.foreign_model import is_foreign_model
from megatron_ckpt.formats.huggingface import SafetensorsFolder, open_folder
from megatron_ckpt.formats.quantized import Mxfp4
from megatron_ckpt.formats.special_tokens import special_token_ids, token_content
from megatron_ckpt.formats.weight_files import INDEX, WEIGHTS, find_weight_files, read_json
from megatron_ckpt.views import Box
from safetensors.torch import load_file, save_file


def test_a_foreign_model_is_a_file_or_a_folder_with_settings_and_no_manifest(folder, tmp_path):
    assert is_foreign_model(folder) and is_foreign_model(str(folder))
    assert is_foreign_model(folder / WEIGHTS)
    assert not is_foreign_model(tmp_path) and not is_foreign_model(tmp_path / "nothing")
    ours = CheckpointStore(tmp_path / "run").save(1, {"samples": 1})
    assert not is_foreign_model(ours)
    (ours / "config.json").write_text("{}")
    assert not is_foreign_model(ours)


def test_boxes_are_read_and_their_bytes_reported(toy, folder):
    model = ForeignModel(folder)
    whole = model.read_tensor("layers.1.w")
    parts = [torch.empty(3, 1), torch.empty(2, 2)]
    views = [
        View(parts[0], (6, 2), (1, 1), (3, 1)),  # the end of the first and the start of the other
        View(parts[1], (6, 2), (4, 0), (2, 2)),
    ]
    filled = []
    model.load_tensors({"word": [], "layers.1.w": views}, progress=filled.append)
    assert torch.equal(parts[0], whole[1:4, 1:]) and torch.equal(parts[1], whole[4:])
    assert filled == [3 * 4, 4 * 4]
    model.load_tensors({"layers.1.w": views})
    model.check_shapes({"word": [5, 2], "layers.0.w": [6, 2], "layers.1.w": [6, 2]})
    with pytest.raises(CheckpointError, match="word"):
        model.check_shapes({"word": [5, 3], "layers.0.w": [6, 2], "layers.1.w": [6, 2]})


@pytest.mark.parametrize(
    ("step", "shape"),
    [
        (("stack", {"dim": 0}), (2, 3, 2)),
        (("interleave", {"dim": 0, "blocks": 3}), (6, 2)),
        (("concat", {"dim": 0}), (6, 2)),
    ],
)
def test_a_rank_may_hold_no_element_of_a_tensor(toy, folder, step, shape):
    rows = [("word", ["net.word"], []), ("layers.{i}.w", ["net.{i}.a", "net.{i}.b"], [step])]
    toy.active_rows = lambda config: rows
    filled = []
    for dim in range(len(shape)):
        offsets = tuple(extent if at == dim else 0 for at, extent in enumerate(shape))
        lengths = tuple(0 if at == dim else extent for at, extent in enumerate(shape))
        view = View(torch.empty(lengths), shape, offsets, lengths)
        ForeignModel(folder).load_tensors({"layers.1.w": [view]}, progress=filled.append)
    assert filled == [0] * len(shape)


def test_names_that_are_not_there_are_shown_with_the_nearest(toy, folder):
    model = ForeignModel(folder)
    with pytest.raises(CheckpointError, match=r"has no tensor 'wrod' \(nearest: 'word'\)"):
        model.read_tensor("wrod")
    with pytest.raises(CheckpointError, match=r"no file 'tokenizer/tokenizer.jso' \(nearest: 't"):
        model.read_file("tokenizer/tokenizer.jso")
    assert model.read_file("tokenizer/tokenizer.json") == b"{}"
    assert model.read_tensor("word", torch.float16).dtype == torch.float16


def test_settings_for_absent_tensors_hold_only_without_them(toy, folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"depth": 7}))
    toy.if_absent = {"net.{i}.a": {"depth": 9}, "net.{i}.c": {"depth": 2}}
    assert ForeignModel(folder).model.config["num_layers"] == 2


def test_a_digest_depends_on_settings_and_shapes_but_not_on_values(toy, folder):
    first = ForeignModel(folder).digest
    weights = load_file(folder / WEIGHTS)
    save_file({name: tensor + 1 for name, tensor in weights.items()}, folder / WEIGHTS)
    assert ForeignModel(folder).digest == first
    save_file({name: tensor.double() for name, tensor in weights.items()}, folder / WEIGHTS)
    assert ForeignModel(folder).digest != first


def test_a_digest_does_not_depend_on_the_order_of_the_settings(toy, folder):
    first, config_from_hf = ForeignModel(folder), toy.config_from_hf

    class Reversed(type(config_from_hf({"depth": 2}))):
        def to_json(self):
            return json.dumps(dict(reversed(json.loads(super().to_json()).items())))

    toy.config_from_hf = lambda values: Reversed(values["depth"])
    other = ForeignModel(folder)
    assert list(other.model.config) == [*reversed(first.model.config)]
    assert other.digest == first.digest


def test_views_of_another_dtype_or_shape_are_refused(toy, folder):
    model = ForeignModel(folder)
    kept = torch.full((5, 2), 7.0, dtype=torch.float64)
    with pytest.raises(CheckpointError, match="'word' is stored as F32, but the model has F64; lo"):
        model.load_tensors({"word": [View.whole(kept)]})
    assert (kept == 7.0).all()
    model.load_tensors({"word": [View.whole(kept)]}, cast="floating")
    assert torch.equal(kept.float(), model.read_tensor("word"))
    with pytest.raises(CheckpointError, match="word"):
        model.load_tensors({"word": [View.whole(torch.empty(4, 2))]})


def test_former_endings_and_missing_prefixes_are_replaced(tmp_path):
    def names(*stored, prefix="net.", **settings):
        save_file({name: torch.ones(1) for name in stored}, tmp_path / "a.safetensors")
        made = SafetensorsFolder(tmp_path, ["a.safetensors"], prefix, **settings)
        assert len(made) == len(stored)
        return sorted(made)

    assert names("a.gamma", "b.w") == ["net.a.gamma", "net.b.w"]
    assert names("net.a", "b") == ["b", "net.a"]
    assert names("a", prefix="") == ["a"]
    former = {".gamma": ".weight", ".beta": ".bias"}
    found = names("net.a.gamma", "net.a.beta", "net.gamma.w", former_endings=former)
    assert found == ["net.a.bias", "net.a.weight", "net.gamma.w"]
    with pytest.raises(CheckpointError, match=r"net.a.gamma and net.a.weight, two names of one te"):
        names("net.a.gamma", "net.a.weight", former_endings=former)


def test_boxes_of_files_hold_the_elements_inside(tmp_path):
    tensors = {"a": torch.arange(12.0).view(3, 4), "one": torch.tensor(5.0)}
    save_file(tensors, tmp_path / "a.safetensors")
    made = SafetensorsFolder(tmp_path, ["a.safetensors"])
    assert made.box("a", Box((1, 2), (2, 1))).tolist() == [[6.0], [10.0]]
    assert made.box("one", Box((), ())).item() == 5.0
    assert {n: (t.shape, t.dtype) for n, t in made.meta().items()} == {
        n: (t.shape, t.dtype) for n, t in tensors.items()
    }
    assert not made.is_packed("a")


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"dtype": "float16"}, torch.float16),
        ({"torch_dtype": "float32"}, torch.float32),
        ({"dtype": "float16", "torch_dtype": "float32"}, torch.float16),
        ({"dtype": "int8"}, torch.bfloat16),
        ({"dtype": ["float16"]}, torch.bfloat16),
    ],
)
def test_quantized_tensors_stand_for_those_of_the_dtype_of_the_settings(tmp_path, settings, dtype):
    fp8 = {"quant_method": "fp8", "weight_block_size": [1, 1]}
    config = {"quantization_config": fp8, **settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {
        "w": torch.ones(2, 2).to(torch.float8_e4m3fn),
        "w_scale_inv": torch.full((2, 2), 2.0),
        "ids": torch.ones(3, dtype=torch.uint8),  # of one byte, and not quantized
        "plain": torch.ones(3, dtype=torch.float64),
    }
    save_file(tensors, tmp_path / WEIGHTS)
    made = open_folder(tmp_path).open_tensors("", {})
    found = {name: tensor.dtype for name, tensor in made.meta().items()}
    assert found == {"w": dtype, "ids": torch.uint8, "plain": torch.float64}
    assert made["w"].tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert made.box("plain", Box((1,), (2,))).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("blocks", "scales", "fits"),
    [
        ((2, 3, 4, 16), (2, 3, 4), True),
        ((2, 3, 4, 17), (2, 3, 4), False),
        ((2, 3, 4, 16), (2, 3, 5), False),
        ((3, 4, 16), (3, 4), False),
    ],
)
def test_blocks_of_experts_have_sixteen_bytes_and_a_scale_each(blocks, scales, fits):
    if fits:
        assert Mxfp4().shape([blocks, scales]) == (2, 4 * 32, 3)
        return
    with pytest.raises(ValueError, match="expected"):
        Mxfp4().shape([blocks, scales])


def test_an_index_may_name_the_file_of_the_whole_model(folder):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"net.word": WEIGHTS}}))
    assert find_weight_files(folder, {}).names == (WEIGHTS,)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 6])
def test_at_most_three_files_are_named(tmp_path, count):
    for number in range(count):
        (tmp_path / f"{number}.bin").write_bytes(b"")
    shown = ", ".join(f"{number}.bin" for number in range(min(count, 3)))
    more = f" and {count - 3} more" if count > 3 else ""
    listed = f", only {shown}{more}" if count else ""
    with pytest.raises(CheckpointError) as caught:
        find_weight_files(tmp_path, {})
    assert str(caught.value) == (
        f"{tmp_path} has neither {WEIGHTS} nor {INDEX}{listed}; save the model with safetensors"
    )


def test_two_files_of_one_model_differ_in_dtype_shape_or_bytes(folder):
    weights = load_file(folder / WEIGHTS)
    name = sorted(weights)[0]
    index = {"weight_map": dict.fromkeys(weights, "other.safetensors")}
    (folder / INDEX).write_text(json.dumps(index))
    same = weights[name]
    save_file(weights, folder / "other.safetensors")
    assert find_weight_files(folder, {}).note is None
    bits = same.view(torch.int32)
    for other in (same.reshape(-1), bits, torch.where(same == same[0, 0], -same, same)):
        save_file(weights | {name: other.contiguous()}, folder / "other.safetensors")
        with pytest.raises(CheckpointError, match=f"which differ in '{name}'"):
            find_weight_files(folder, {})


def test_a_missing_file_of_settings_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config.json is missing; use a folder of a Hugging"):
        read_json(tmp_path, "config.json")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is missing"):
        read_json(tmp_path / "file", "config.json")
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", (100 << 20) + 1)  # without content on the disk
    with pytest.raises(CheckpointError, match=r"104857601 bytes; the limit .* is 104857600$"):
        read_json(tmp_path, "config.json")


def test_entries_of_an_unknown_form_are_no_special_tokens():
    added = [1, {"content": 3, "id": 4}, {"id": 5}, {"content": "t", "id": True}]
    added.append({"content": "good", "id": 7})
    config = {"bos_token": "t", "eos_token": "good", "pad_token": 3}
    for vocabulary, bos in (({"t": 2}, None), (["t"], None), (None, None)):
        files = {
            "tokenizer.json": json.dumps(
                {"added_tokens": added, "model": {"vocab": vocabulary}}
            ).encode(),
            "tokenizer_config.json": json.dumps(config).encode(),
        }
        assert tuple(special_token_ids(files).values()) == (bos, 7, None)
    for tokenizer in ({"model": [], "added_tokens": {}}, {"model": {"vocab": {"t": 0}}}):
        files["tokenizer.json"] = json.dumps(tokenizer).encode()
        expected = 0 if tokenizer["model"] else None
        assert special_token_ids(files)["bos_token_id"] == expected
    assert [token_content(each) for each in ("a", {"content": "b"}, {}, 3)] == [
        "a",
        "b",
        None,
        None,
    ]
