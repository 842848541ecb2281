"""Merging adapters into the weights of a checkpoint, tensor by tensor."""

import pytest
import torch
from megatron_ckpt import CheckpointStore, ModelRecord, View, find_checkpoint
from megatron_models import GPTConfig, config_of, record_of
from megatron_parallel.tensor_parallel import LoRA
from megatron_train.cli import main
from megatron_train.errors import TrainError
from megatron_train.merging import merge_checkpoint

CONFIG = GPTConfig(
    num_layers=1,
    hidden_size=8,
    num_attention_heads=2,
    vocab_size=16,
    max_position_embeddings=8,
    num_experts=2,
    moe_router_enable_expert_bias=True,
    moe_router_score_function="sigmoid",
)
BUFFER = "layers.0.mlp.router.expert_bias"
OBJECTIVE = {"linear_product": "lora", "lora.rank": 2, "lora.alpha": 3.0}
OBJECTIVE |= {"lora.target_modules": ["linear_qkv"]}


def save(folder, state, **options):
    """Saves a checkpoint of an adapted model."""
    views = {name: [View.whole(tensor)] for name, tensor in state.items()}
    options = {"model": ModelRecord(family="llama", **record_of(CONFIG)), **options}
    return CheckpointStore(folder).save(3, views | {"run": {"objective": OBJECTIVE}}, **options)


def test_weights_are_merged_in_float64_and_buffers_are_copied(tmp_path, capsys):
    generator = torch.Generator().manual_seed(0)

    def draw(shape):
        return torch.randn(tuple(shape), generator=generator).bfloat16()

    specs = CONFIG.parameters()
    weights = {name: draw(spec.sharding.shape) for name, spec in specs.items()}
    (adapted,) = [name for name, spec in specs.items() if spec.role == "linear_qkv"]
    stem, product = adapted.removesuffix("weight"), LoRA(2, 3.0)
    added = {
        f"{stem}{local}": draw(sharding.shape)
        for local, sharding in product.shardings(specs[adapted].sharding).items()
    }
    state = {**weights, **added, BUFFER: torch.tensor([0.25, -0.5])}
    moments = {f"{next(iter(added))}.exp_avg": torch.ones(2, 8)}  # are not in the new checkpoint
    save(tmp_path / "tuned", state | moments)
    merged = find_checkpoint(merge_checkpoint(tmp_path / "tuned", tmp_path / "merged"))
    again = tmp_path / "again"
    assert main(["merge", "--load", str(tmp_path / "tuned"), "--save", str(again)]) == 0
    printed = capsys.readouterr().out
    assert printed == f"saved merged checkpoint {find_checkpoint(again).path}\n"
    found = {name: merged.read_tensor(name) for name in merged.tensors}
    assert merged.iteration == 3 and found.keys() == weights.keys() | {BUFFER}
    assert merged.model.family == "llama" and config_of(merged.model) == CONFIG
    assert not [name for name in merged.manifest.files if "/" in name]  # there is no tokenizer
    a, b = (tensor.double() for tensor in added.values())
    exact = weights[adapted].double() + 1.5 * torch.tensordot(b, a, dims=1)
    expected = {**weights, BUFFER: state[BUFFER], adapted: exact.bfloat16()}
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_merged_checkpoint_has_the_tokenizer_and_no_weight_that_the_source_lacks(tmp_path):
    """The first and last weights are missing, as in a part of a model."""
    weights = {n: torch.ones(tuple(s.sharding.shape)) for n, s in CONFIG.parameters().items()}
    names = [*weights][1:-1]
    product, stem = LoRA(2, 3.0), "layers.0.attention.qkv."
    spec = CONFIG.parameters()[f"{stem}weight"]
    assert f"{stem}weight" in names
    a, b = (torch.ones(tuple(s.shape)) for s in product.shardings(spec.sharding).values())
    state = {name: weights[name] for name in names} | {f"{stem}lora_a": a, f"{stem}lora_b": b}
    files = {"tokenizer/vocab.json": b"{}", "tokenizer/merges.txt": b"a b"}
    save(tmp_path / "tuned", state, files={**files, "other/notes.txt": b"not copied"})
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "unrelated").write_text("")
    merged = find_checkpoint(merge_checkpoint(tmp_path / "tuned", tmp_path / "merged"))
    assert {*merged.tensors} == {*names}
    attached = [name for name in merged.manifest.files if "/" in name]
    assert {name: merged.read_file(name) for name in attached} == files
    assert merged.read_tensor(f"{stem}weight").unique().tolist() == [1 + 1.5 * 2]


def test_a_checkpoint_without_a_model_or_a_folder_with_one_is_refused(tmp_path):
    path = save(tmp_path / "nameless", {}, model=None)
    with pytest.raises(TrainError, match=f"{path} has no record of its model; give another"):
        merge_checkpoint(tmp_path / "nameless", tmp_path / "merged")
    with pytest.raises(TrainError, match=r"nameless already has a checkpoint \(.*0003\); give a"):
        merge_checkpoint(tmp_path / "nameless", tmp_path / "nameless")
