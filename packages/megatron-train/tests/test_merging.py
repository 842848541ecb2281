"""Merging adapters into the weights of a checkpoint, tensor by tensor."""

import torch
from megatron_ckpt import CheckpointStore, ModelRecord, View, find_checkpoint
from megatron_models import GPTConfig, record_of
from megatron_parallel.tensor_parallel import LoRA
from megatron_train.cli import main
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
    CheckpointStore(tmp_path / "tuned").save(
        3,
        {name: [View.whole(tensor)] for name, tensor in state.items()}
        | {"run": {"objective": OBJECTIVE}},
        model=ModelRecord(family=None, **record_of(CONFIG)),
    )
    merged = find_checkpoint(merge_checkpoint(tmp_path / "tuned", tmp_path / "merged"))
    again = tmp_path / "again"
    assert main(["merge", "--load", str(tmp_path / "tuned"), "--save", str(again)]) == 0
    printed = capsys.readouterr().out
    assert printed == f"saved merged checkpoint {find_checkpoint(again).path}\n"
    found = {name: merged.read_tensor(name) for name in merged.tensors}
    assert merged.iteration == 3 and found.keys() == weights.keys() | {BUFFER}
    a, b = (tensor.double() for tensor in added.values())
    exact = weights[adapted].double() + 1.5 * torch.tensordot(b, a, dims=1)
    expected = {**weights, BUFFER: state[BUFFER], adapted: exact.bfloat16()}
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
