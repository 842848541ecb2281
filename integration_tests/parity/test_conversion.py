"""Conversion of Hugging Face models to checkpoints and back with megatron-models' families.

The models are those of transformers with random weights; the reference is what transformers wrote.
"""

import json
from pathlib import Path

import pytest
import torch
from megatron_ckpt import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    ForeignModel,
    View,
    export_hf,
    import_hf,
)
from megatron_ckpt.families import find_family
from megatron_ckpt.formats.huggingface import SafetensorsFolder
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

GPT2 = {"n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 24, "vocab_size": 101}
LLAMA = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 40,
    "vocab_size": 101,
    "max_position_embeddings": 24,
    "eos_token_id": 7,
}
SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES = {
    "gpt2": ("GPT2", GPT2),
    "gpt2-untied-wide": ("GPT2", GPT2 | {"n_inner": 72, "tie_word_embeddings": False}),
    "llama": ("Llama", LLAMA),
    "llama-tied": ("Llama", LLAMA | {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama-attention-bias": ("Llama", LLAMA | {"attention_bias": True}),
    "llama-mlp-bias": ("Llama", LLAMA | {"mlp_bias": True}),
    "llama3-rope": ("Llama", LLAMA | {"rope_parameters": SCALING}),
}


def write_model(kind: str, settings: dict, folder: Path, dtype: torch.dtype = torch.float32):
    """Writes a transformers model with random parameters, including norms and biases."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = getattr(transformers, f"{kind}ForCausalLM" if kind == "Llama" else f"{kind}LMHeadModel")
    model = model(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder)
    return model


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert sorted(left) == sorted(right)
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_is_converted_back_bit_for_bit_and_loads_in_transformers(tmp_path, case, dtype):
    kind, settings = CASES[case]
    model = write_model(kind, settings, tmp_path / "theirs", dtype)
    import_hf(tmp_path / "theirs", tmp_path / "run")
    back = export_hf(tmp_path / "run", tmp_path / "back")
    assert_equal(tensors(tmp_path / "theirs"), tensors(back))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(back, dtype="auto")
    assert loaded.dtype == dtype
    assert_equal(dict(model.named_parameters()), dict(loaded.named_parameters()))
    tokens = torch.arange(20).reshape(2, 10)
    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype="auto")
    with torch.no_grad():
        # In float64: weights read from a file may be unaligned, which changes rounding.
        theirs, ours = (kept.double().eval()(tokens).logits for kept in (original, loaded))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    assert loaded.config.eos_token_id == model.config.eos_token_id


@pytest.mark.parametrize("case", CASES)
def test_the_checkpoint_holds_exactly_the_parameters_of_our_model(tmp_path, case):
    models = pytest.importorskip("megatron_models.parameters")
    from megatron_models import GPTConfig

    kind, settings = CASES[case]
    write_model(kind, settings, tmp_path / "theirs")
    checkpoint = Checkpoint(import_hf(tmp_path / "theirs", tmp_path / "run"))
    config = GPTConfig.from_json(json.dumps(checkpoint.model.config))
    stored = {name: record.shape for name, record in checkpoint.tensors.items()}
    assert stored == {name: tuple(s) for name, s in models.parameter_shapes(config).items()}


def test_query_key_and_value_rows_of_a_group_are_adjacent(tmp_path):
    write_model("Llama", LLAMA, tmp_path / "theirs")
    theirs = tensors(tmp_path / "theirs")
    ours = Checkpoint(import_hf(tmp_path / "theirs", tmp_path / "run"))
    qkv = ours.read_tensor("layers.1.attention.qkv.weight")
    part = {x: theirs[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"}
    for group in range(2):  # of 2 query heads of 12 channels each
        assert torch.equal(qkv[group, :24], part["q"][24 * group : 24 * group + 24])
        assert torch.equal(qkv[group, 24:36], part["k"][12 * group : 12 * group + 12])
        assert torch.equal(qkv[group, 36:], part["v"][12 * group : 12 * group + 12])


def test_a_shard_is_read_from_the_boxes_that_it_needs(tmp_path, monkeypatch):
    write_model("Llama", LLAMA, tmp_path / "theirs")
    model, read = ForeignModel(tmp_path / "theirs"), []
    box = SafetensorsFolder.box

    def counted(folder, name, part):
        read.append((name.rpartition("layers.1.")[2], part.lengths))
        return box(folder, name, part)

    monkeypatch.setattr(SafetensorsFolder, "box", counted)
    names = ("layers.1.attention.qkv.weight", "layers.1.mlp.up.weight")
    qkv, up = (model.read_tensor(name) for name in names)
    parts = [View(torch.empty(1, 48, 32), (2, 48, 32), (1, 0, 0), (1, 48, 32))]
    halves = [View(torch.empty(2, 20, 32), (2, 40, 32), (0, 20, 0), (2, 20, 32))]
    model.load_tensors(dict(zip(names, (parts, halves), strict=True)))
    assert torch.equal(parts[0].tensor, qkv[1:]) and torch.equal(halves[0].tensor, up[:, 20:])
    assert sorted(read) == [
        ("mlp.gate_proj.weight", (20, 32)),
        ("mlp.up_proj.weight", (20, 32)),
        ("self_attn.k_proj.weight", (12, 32)),
        ("self_attn.q_proj.weight", (24, 32)),
        ("self_attn.v_proj.weight", (12, 32)),
    ]


def test_shards_an_index_and_another_dtype(tmp_path):
    model = write_model("Llama", LLAMA, tmp_path / "theirs")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="30KB")
    import_hf(tmp_path / "sharded", tmp_path / "run", dtype=torch.bfloat16)
    back = export_hf(tmp_path / "run", tmp_path / "back", max_shard_bytes=20_000)
    assert len(list(back.glob("*.safetensors"))) > 2
    half = {name: t.bfloat16() for name, t in tensors(tmp_path / "theirs").items()}
    assert_equal(half, tensors(back))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(back, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert_equal(dict(model.to(torch.bfloat16).named_parameters()), dict(loaded.named_parameters()))


def test_files_of_the_headless_gpt2_and_its_buffers_are_read(tmp_path):
    write_model("GPT2", GPT2, tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    theirs = load_file(file)
    headless = {name.removeprefix("transformer."): tensor for name, tensor in theirs.items()}
    headless["h.0.attn.bias"] = torch.ones(1, 1, 24, 24).tril()
    save_file(headless, file, {"format": "pt"})
    import_hf(tmp_path / "theirs", tmp_path / "run")
    assert_equal(theirs, tensors(export_hf(tmp_path / "run", tmp_path / "back")))


def test_padding_of_a_foreign_vocabulary_is_dropped(tmp_path):
    write_model("GPT2", GPT2, tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    theirs = load_file(file)
    word = "transformer.wte.weight"
    padded = theirs | {word: torch.cat([theirs[word], torch.zeros(27, 32)])}
    save_file(padded, file, {"format": "pt"})
    import_hf(tmp_path / "theirs", tmp_path / "run")
    assert_equal(theirs, tensors(export_hf(tmp_path / "run", tmp_path / "back")))


def test_tokenizer_files_and_foreign_settings_pass_through(tmp_path):
    write_model("GPT2", GPT2 | {"summary_type": "cls_index"}, tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_text('{"version": "1.0"}')
    (tmp_path / "theirs" / "merges.txt").write_text("#version: 0.2\n")
    checkpoint = Checkpoint(import_hf(tmp_path / "theirs", tmp_path / "run"))
    assert (checkpoint.path / "tokenizer" / "merges.txt").read_text() == "#version: 0.2\n"
    back = export_hf(checkpoint, tmp_path / "back")
    assert (back / "tokenizer.json").read_text() == '{"version": "1.0"}'
    assert json.loads((back / "config.json").read_text())["summary_type"] == "cls_index"
    before = json.loads((tmp_path / "theirs" / "generation_config.json").read_text())
    assert json.loads((back / "generation_config.json").read_text()) == before


def test_tensors_that_do_not_fit_are_named_and_no_file_is_left(tmp_path):
    write_model("GPT2", GPT2, tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    theirs = load_file(file)
    name = "transformer.h.1.mlp.c_fc.weight"
    wrong = {
        "no tensor": {k: v for k, v in theirs.items() if k != name} | {name + "s": theirs[name]},
        "no row uses tensor 'transformer.extra'": theirs | {"transformer.extra": torch.ones(2)},
        "c_fc.weight": theirs | {name: torch.ones(3, 3, 3)},
    }
    for words, changed in wrong.items():
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(CheckpointError, match=words):
            import_hf(tmp_path / "theirs", tmp_path / "run")
    assert not list((tmp_path / "run").glob("iter_*"))


def test_errors_name_what_is_wrong(tmp_path):
    write_model("GPT2", GPT2, tmp_path / "theirs")
    import_hf(tmp_path / "theirs", tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"no family 'gpt'.*nearest: 'gpt2'"):
        import_hf(tmp_path / "theirs", tmp_path / "other", family="gpt")
    with pytest.raises(CheckpointError, match="cannot be exported to that family"):
        export_hf(tmp_path / "run", tmp_path / "back", family="llama")
    config = tmp_path / "theirs" / "config.json"
    config.write_text(json.dumps({"architectures": ["BloomForCausalLM"]}))
    with pytest.raises(CheckpointError, match=r"BloomForCausalLM; installed are .*gpt2, .*llama"):
        import_hf(tmp_path / "theirs", tmp_path / "other")
    CheckpointStore(tmp_path / "plain").save(1, {"w": [View.whole(torch.ones(2))]})
    with pytest.raises(CheckpointError, match="has no record of its model"):
        export_hf(tmp_path / "plain", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_an_exported_model_stops_at_the_end_of_document_token(tmp_path):
    """Checks the token that ends a text in the exported folder; transformers' default differs."""
    from megatron_data import train_bpe
    from megatron_models import GPT, GPTConfig
    from megatron_parallel import Mesh, collect_shardings, parameter_views

    tokenizer = train_bpe(["the whale sees the ship"] * 3, 262)
    tokenizer.save(tmp_path / "tokenizer")
    write_model("Llama", LLAMA | {"vocab_size": 262}, tmp_path / "theirs")
    imported = Checkpoint(import_hf(tmp_path / "theirs", tmp_path / "imported"))
    config = GPTConfig.from_json(json.dumps(imported.model.config))
    model, mesh = GPT(config, Mesh.single()), Mesh.single()
    path = CheckpointStore(tmp_path / "run").save(
        1,
        parameter_views(model, collect_shardings(model), mesh),
        model=imported.model,
        files={"tokenizer": tmp_path / "tokenizer"},
    )
    back = export_hf(path, tmp_path / "back")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(back)
    assert loaded.config.eos_token_id == tokenizer.eod_id
    assert loaded.generation_config.eos_token_id == tokenizer.eod_id
    assert loaded.config.bos_token_id is None


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Mixtral"])
def test_default_configurations_of_transformers_are_accepted(kind):
    config = getattr(transformers, f"{kind}Config")()
    values = json.loads(config.to_json_string(use_diff=False))
    family = find_family(kind.lower())
    assert family.config_from_hf(values).hidden_size == config.hidden_size


@pytest.mark.parametrize(
    ("kind", "embedding"), [("GPT2", "transformer.wte"), ("Llama", "model.embed_tokens")]
)
def test_an_output_layer_that_is_declared_tied_is_compared(tmp_path, kind, embedding):
    settings = {"GPT2": GPT2, "Llama": LLAMA}[kind]
    write_model(kind, settings | {"tie_word_embeddings": True}, tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.safetensors"
    held = load_file(path)
    held["lm_head.weight"] = held[f"{embedding}.weight"].clone()
    save_file(held, path, {"format": "pt"})
    import_hf(tmp_path / "theirs", tmp_path / "run")
    held["lm_head.weight"][3, 5] += 1
    save_file(held, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' differs from .* ties them"):
        import_hf(tmp_path / "theirs", tmp_path / "other")
