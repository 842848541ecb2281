"""GGUF files written here and read with a made-up family that has Hugging Face's names."""

import json
import sys
import weakref
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from megatron_ckpt import Checkpoint, CheckpointError, import_hf
from megatron_ckpt.formats.gguf import open_gguf
from megatron_ckpt.formats.gguf_architectures.architecture import Architecture
from megatron_ckpt.formats.gguf_architectures.table import ARCHITECTURES

HEADS, GROUPS, HEAD_DIM, HIDDEN, FFN, VOCAB, LAYERS = 4, 2, 8, 32, 64, 40, 2
SIZES = {"q": HEADS * HEAD_DIM, "k": GROUPS * HEAD_DIM, "v": GROUPS * HEAD_DIM}
LLAMA = {
    "block_count": np.uint32(LAYERS),
    "context_length": np.uint32(16),
    "embedding_length": np.uint32(HIDDEN),
    "feed_forward_length": np.uint32(FFN),
    "attention.head_count": np.uint32(HEADS),
    "attention.head_count_kv": np.uint32(GROUPS),
    "attention.layer_norm_rms_epsilon": np.float32(1e-5),
    "rope.freq_base": np.float32(1e5),
}


@dataclass
class Config:
    num_layers: int
    values: dict

    def to_json(self):
        return json.dumps(asdict(self))


def rows(config):
    layer = "model.layers.{i}"
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    names += [f"{layer}.{part}_layernorm.weight" for part in ("input", "post_attention")]
    names += [f"{layer}.self_attn.{x}_proj.weight" for x in "qkvo"]
    names += [f"{layer}.mlp.{x}_proj.weight" for x in ("gate", "up", "down")]
    if not config.values["tie_word_embeddings"]:
        names.append("lm_head.weight")
    return [(name, [name], []) for name in names]


FAMILY = SimpleNamespace(
    name="same",
    architectures=("LlamaForCausalLM",),
    ignored=(),
    prefix="model.",
    defers_to=(),
    if_absent={},
    former_endings={},
    active_rows=rows,
    config_from_hf=lambda values: Config(values["num_hidden_layers"], dict(values)),
    kind="same",
    config_version=0,
    config_from_record=lambda values, version: Config(**values),
)


@pytest.fixture(autouse=True)
def family(monkeypatch):
    monkeypatch.setitem(sys.modules, "same_family", SimpleNamespace(FAMILY=FAMILY))
    entry = EntryPoint("same", "same_family:FAMILY", "megatron.families")
    monkeypatch.setattr("megatron_ckpt.families.entry_points", lambda group: [entry])


def tensors():
    """Returns random weights by their GGUF names, in Hugging Face's order of rows."""
    draw = np.random.default_rng(0)

    def random(*shape):
        return draw.standard_normal(shape).astype(np.float32)

    made = {"token_embd.weight": random(VOCAB, HIDDEN), "output_norm.weight": random(HIDDEN)}
    for i in range(LAYERS):
        made |= {f"blk.{i}.{name}_norm.weight": random(HIDDEN) for name in ("attn", "ffn")}
        made |= {f"blk.{i}.attn_{x}.weight": random(SIZES[x], HIDDEN) for x in "qkv"}
        made[f"blk.{i}.attn_output.weight"] = random(HIDDEN, HEADS * HEAD_DIM)
        made |= {f"blk.{i}.ffn_{name}.weight": random(FFN, HIDDEN) for name in ("gate", "up")}
        made[f"blk.{i}.ffn_down.weight"] = random(HIDDEN, FFN)
    return made


def pairs(weight):
    """Returns rows in the order of llama.cpp: row 2 j + k is row k * half + j of Hugging Face."""
    stored = np.empty_like(weight)
    half = HEAD_DIM // 2
    for row in range(len(weight)):
        head, inside = divmod(row, HEAD_DIM)
        j, k = divmod(inside, 2)
        stored[row] = weight[head * HEAD_DIM + k * half + j]
    return stored


def write(path, *, llama=None, weights=None, kinds=None, more=None, name="llama", tokenizer=True):
    """Writes a GGUF file; ``kinds`` quantises tensors, ``more`` adds metadata."""
    writer = gguf.GGUFWriter(path, name)
    scalar = {
        np.uint32: writer.add_uint32,
        np.int32: writer.add_int32,
        np.float32: writer.add_float32,
        str: writer.add_string,
        bool: writer.add_bool,
        list: writer.add_array,
    }
    metadata = {f"llama.{key}": value for key, value in {**LLAMA, **(llama or {})}.items()}
    if tokenizer:
        words = [*"abcdefghij", "ab", "abc", *(f"x{i}" for i in range(VOCAB - 14)), "<s>", "<t>"]
        metadata |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": words,
            "tokenizer.ggml.token_type": [1] * 12 + [5] * (VOCAB - 14) + [3, 4],
            "tokenizer.ggml.merges": ["a b", "ab c"],
            "tokenizer.ggml.bos_token_id": np.uint32(VOCAB - 2),
            "tokenizer.ggml.add_bos_token": True,
        }
    for key, value in {**metadata, **(more or {})}.items():
        if value is not None:
            scalar[type(value)](key, value.item() if isinstance(value, np.generic) else value)
    for key, weight in (tensors() if weights is None else weights).items():
        stored = pairs(weight) if ".attn_q." in key or ".attn_k." in key else weight
        kind = (kinds or {}).get(key)
        if kind is None:
            writer.add_tensor(key, stored)
        else:
            writer.add_tensor(key, gguf.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def imported(path, folder, **settings):
    return Checkpoint(import_hf(path, folder / "run", **settings))


def test_names_and_rotary_rows_become_hugging_faces(tmp_path):
    made = imported(write(tmp_path / "m.gguf"), tmp_path)
    theirs = tensors()
    expected = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.1.input_layernorm.weight": "blk.1.attn_norm.weight",
        "model.layers.1.post_attention_layernorm.weight": "blk.1.ffn_norm.weight",
        "model.layers.1.self_attn.q_proj.weight": "blk.1.attn_q.weight",
        "model.layers.1.self_attn.k_proj.weight": "blk.1.attn_k.weight",
        "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
        "model.layers.1.self_attn.o_proj.weight": "blk.1.attn_output.weight",
        "model.layers.1.mlp.gate_proj.weight": "blk.1.ffn_gate.weight",
        "model.layers.1.mlp.up_proj.weight": "blk.1.ffn_up.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
    }
    for ours, name in expected.items():
        assert torch.equal(made.read_tensor(ours), torch.from_numpy(theirs[name])), ours
    assert len(made.tensors) == 2 + LAYERS * 9


def test_quantised_tensors_become_float32_and_plain_ones_keep_their_type(tmp_path):
    weights = tensors()
    # Multiples of the scale of a block (its largest value / 127 for Q8_0) are restored exactly.
    steps = np.arange(VOCAB * HIDDEN, dtype=np.float32).reshape(VOCAB, HIDDEN) % 32 - 16
    steps[:, 0] = 127
    weights["token_embd.weight"] = steps * 0.25
    weights["output_norm.weight"] = weights["output_norm.weight"].astype(np.float16)
    kinds = {
        "token_embd.weight": gguf.GGMLQuantizationType.Q8_0,
        "blk.0.ffn_up.weight": gguf.GGMLQuantizationType.BF16,
        "blk.1.attn_q.weight": gguf.GGMLQuantizationType.Q4_1,
    }
    path = write(tmp_path / "m.gguf", weights=weights, kinds=kinds)
    made = imported(path, tmp_path)
    word = made.read_tensor("model.embed_tokens.weight")
    assert word.dtype == torch.float32 and torch.equal(word, torch.from_numpy(steps * 0.25))
    norm = made.read_tensor("model.norm.weight")
    assert norm.dtype == torch.float16
    assert torch.equal(norm, torch.from_numpy(weights["output_norm.weight"]))
    up = made.read_tensor("model.layers.0.mlp.up_proj.weight")
    original = torch.from_numpy(weights["blk.0.ffn_up.weight"])
    assert up.dtype == torch.bfloat16 and torch.equal(up, original.bfloat16())
    query = made.read_tensor("model.layers.1.self_attn.q_proj.weight")
    original = torch.from_numpy(weights["blk.1.attn_q.weight"])
    step = (original.amax(1) - original.amin(1)) / 15  # a row of 32 is one block of 16 levels
    error = (query - original).abs()
    assert (error <= 0.51 * step[:, None] + 1e-2).all() and error.max() > 0
    half = Checkpoint(import_hf(path, tmp_path / "half", dtype=torch.bfloat16))
    assert {record.dtype for record in half.tensors.values()} == {"BF16"}


def test_tensors_are_read_one_at_a_time(tmp_path, monkeypatch):
    from megatron_ckpt.formats.gguf_file import GGUFFile

    path = write(tmp_path / "m.gguf")
    read, alive = [], []
    original = GGUFFile.read

    def watch(self, name):
        alive.append(sum(reference() is not None for reference in read))
        tensor = original(self, name)
        read.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    monkeypatch.setattr(GGUFFile, "read", watch)
    imported(path, tmp_path)
    assert alive == [0] * len(tensors())


def test_the_configuration_is_that_of_a_hugging_face_folder(tmp_path):
    made = imported(write(tmp_path / "m.gguf"), tmp_path)
    config = json.loads(made.read_file("huggingface/config.json"))
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 16,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "rms_norm_eps": 1e-5,  # the decimal, not the float32 next to it
        "num_key_value_heads": GROUPS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "rope_theta": 100000.0,
        "bos_token_id": VOCAB - 2,
    }
    assert made.model.config["values"] == config
    untied = write(tmp_path / "u.gguf", weights=tensors() | {"output.weight": np.ones((40, 32))})
    made = Checkpoint(import_hf(untied, tmp_path / "untied"))
    assert not made.model.config["values"]["tie_word_embeddings"]
    assert made.read_tensor("lm_head.weight").shape == (40, 32)


def test_an_added_architecture_is_read_without_a_change_to_the_reader(tmp_path):
    plain = Architecture(
        rows=lambda config: [("model.norm.weight", ["output_norm.weight"], [])],
        config=lambda file: {"num_hidden_layers": file.require("falcon.block_count")},
        ignored=("token_embd.weight", *(f"blk.{{i}}.{name}" for name in ("a", "b"))),
    )
    weights = {name: np.ones(4, np.float32) for name in ("output_norm.weight", "blk.0.a")}
    path = write(
        tmp_path / "m.gguf",
        name="falcon",
        weights=weights,
        more={"falcon.block_count": np.uint32(1)},
    )
    source = open_gguf(path, {**ARCHITECTURES, "falcon": plain})
    assert source.config == {"num_hidden_layers": 1}
    assert dict(source.open_tensors("", {}).meta()).keys() == {"model.norm.weight"}
    assert torch.equal(source.open_tensors("", {})["model.norm.weight"], torch.ones(4))


def llama3_factors(factor):
    """Returns the factors of the original Llama 3.1 for theta 5e5 and 8 channels."""
    factors = []
    for channel in range(0, HEAD_DIM, 2):
        wavelength = 2 * np.pi * 5e5 ** (channel / HEAD_DIM)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_rotary_scaling_is_found_in_metadata_and_in_the_tensor_of_factors(tmp_path):
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": np.float32(2.5)}
    made = imported(write(tmp_path / "l.gguf", llama=linear), tmp_path)
    scaling = made.model.config["values"]["rope_scaling"]
    assert scaling == {"rope_type": "linear", "factor": 2.5}
    factors = llama3_factors(32.0)
    assert 1.0 < factors[2] < 32.0  # one channel lies between
    base = {"rope.freq_base": np.float32(5e5)}
    path = write(
        tmp_path / "3.gguf", llama=base, weights=tensors() | {"rope_freqs.weight": factors}
    )
    made = Checkpoint(import_hf(path, tmp_path / "three"))
    assert made.model.config["values"]["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    factors[2] *= 1.01
    write(tmp_path / "3.gguf", llama=base, weights=tensors() | {"rope_freqs.weight": factors})
    with pytest.raises(CheckpointError, match=r"'rope_freqs.weight' are not those of Llama 3.1"):
        import_hf(tmp_path / "3.gguf", tmp_path / "four")


def test_the_tokenizer_is_written_as_hugging_faces_files(tmp_path):
    made = imported(write(tmp_path / "m.gguf"), tmp_path)
    content = json.loads(made.read_file("tokenizer/tokenizer.json"))
    assert content["model"]["merges"] == [["a", "b"], ["ab", "c"]]
    assert content["model"]["vocab"]["abc"] == 11
    assert "x3" not in content["model"]["vocab"]  # unused
    added = {token["content"]: token for token in content["added_tokens"]}
    assert added["<s>"]["id"] == VOCAB - 2 and added["<s>"]["special"]
    assert added["<t>"]["id"] == VOCAB - 1 and not added["<t>"]["special"]
    settings = json.loads(made.read_file("tokenizer/tokenizer_config.json"))
    assert settings["bos_token"] == "<s>" and settings["add_bos_token"]
    assert content["post_processor"]["single"][0]["SpecialToken"]["id"] == "<s>"


def generation(path, tmp_path, name):
    made = Checkpoint(import_hf(path, tmp_path / name))
    return json.loads(made.read_file("huggingface/generation_config.json"))


def test_tokens_that_end_a_text_are_those_of_llama_cpp(tmp_path):
    words = [f"x{i}" for i in range(VOCAB)]
    words[5:9] = ["<|im_end|>", "<|endoftext|>", "<turn>", "<msg>"]
    metadata = {
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [1] * VOCAB,
        "tokenizer.ggml.merges": ["x1 x2"],
    }
    plain = write(tmp_path / "plain.gguf", more=metadata)
    assert generation(plain, tmp_path, "a")["eos_token_id"] == [5, 6]
    ids = {"eos": 6, "eot": 7, "eom": 8}
    named = {f"tokenizer.ggml.{role}_token_id": np.uint32(at) for role, at in ids.items()}
    path = write(tmp_path / "named.gguf", more=metadata | named)
    assert generation(path, tmp_path, "b")["eos_token_id"] == [6, 7, 8, 5]


def test_sampling_of_a_file_is_that_of_its_publisher(tmp_path):
    assert "do_sample" not in generation(write(tmp_path / "none.gguf"), tmp_path, "a")
    metadata = {
        "general.sampling.temp": np.float32(0.7),
        "general.sampling.top_p": np.float32(0.95),
        "general.sampling.penalty_repeat": np.float32(1.05),
    }
    found = generation(write(tmp_path / "m.gguf", more=metadata), tmp_path, "b")
    assert found.pop("bos_token_id") == VOCAB - 2
    assert found == {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 0,
        "top_p": 0.95,
        "repetition_penalty": 1.05,
    }


@pytest.mark.parametrize(
    ("pre", "flag", "starts"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", None, False)],
)
def test_texts_start_with_bos_as_in_llama_cpp(tmp_path, pre, flag, starts):
    metadata = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": flag}
    made = imported(write(tmp_path / "m.gguf", more=metadata), tmp_path)
    content = json.loads(made.read_file("tokenizer/tokenizer.json"))
    assert (content["post_processor"]["type"] == "TemplateProcessing") == starts


@pytest.mark.parametrize(
    ("more", "template"),
    [
        ({}, None),
        ({"tokenizer.chat_template": "one"}, "one"),
        (
            {
                "tokenizer.chat_template": "one",
                "tokenizer.chat_templates": ["tool_use", "rag"],
                "tokenizer.chat_template.tool_use": "two",
                "tokenizer.chat_template.rag": "three",
            },
            [
                {"name": "default", "template": "one"},
                {"name": "tool_use", "template": "two"},
                {"name": "rag", "template": "three"},
            ],
        ),
    ],
)
def test_chat_templates_are_kept(more, template, tmp_path):
    made = imported(write(tmp_path / "m.gguf", more=more), tmp_path)
    settings = json.loads(made.read_file("tokenizer/tokenizer_config.json"))
    assert settings.get("chat_template") == template


SENTENCE_PIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.scores": [0.0] * VOCAB,
    "tokenizer.ggml.merges": None,
}


def test_pairs_of_a_sentence_piece_model_are_ordered_by_the_score_of_their_union(tmp_path):
    words = ["<u>", "a", "b", "c", "ab", "bc", "abc", "<0x00>"]
    words += [f"x{i}" for i in range(VOCAB - len(words))]
    scores = [0.0, 0.0, 0.0, 0.0, -3.0, -1.0, -2.0, 0.0]
    metadata = SENTENCE_PIECE | {
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.scores": scores + [-9.0] * (VOCAB - len(scores)),
        "tokenizer.ggml.token_type": [2, 1, 1, 1, 1, 1, 1, 6, *[4] * (VOCAB - len(scores))],
        "tokenizer.ggml.unknown_token_id": np.uint32(0),
        "tokenizer.ggml.bos_token_id": np.uint32(1),
        "tokenizer.ggml.add_bos_token": False,
    }

    def definition(name, **more):
        path = write(tmp_path / f"{name}.gguf", more=metadata | more)
        made = Checkpoint(import_hf(path, tmp_path / name))
        return json.loads(made.read_file("tokenizer/tokenizer.json"))

    content = definition("default")
    model = content["model"]
    assert model["merges"] == [["b", "c"], ["ab", "c"], ["a", "bc"], ["a", "b"]]
    assert (model["unk_token"], model["byte_fallback"]) == ("<u>", True)
    assert content["post_processor"] is None
    assert len(content["added_tokens"]) == VOCAB - len(scores)
    steps = [step["type"] for step in content["normalizer"]["normalizers"]]
    assert steps == ["Prepend", "Replace"]
    assert content["decoder"]["decoders"][-1]["type"] == "Strip"
    content = definition("plain", **{"tokenizer.ggml.add_space_prefix": False})
    assert [step["type"] for step in content["normalizer"]["normalizers"]] == ["Replace"]
    assert content["decoder"]["decoders"][-1]["type"] == "Fuse"
