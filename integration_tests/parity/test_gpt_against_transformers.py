"""Our GPT with the weights of transformers' models, and their models with our weights.

Models are small and have random weights in fp32: gains are not 1 and biases are not 0. The rows of
the family convert weights and gradients; they are linear, so that a gradient maps as its weight.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from megatron_ckpt import Checkpoint, CheckpointStore, ModelRecord, apply_rows, export_hf, import_hf
from megatron_models import GPT, Family, GPTConfig, record_of
from megatron_models.models.gpt.families import gpt2, llama
from megatron_parallel import Mesh, collect_shardings, parameter_views
from torch.nn import functional

transformers = pytest.importorskip("transformers")

GPT2 = {"n_layer": 3, "n_embd": 48, "n_head": 4, "n_positions": 32, "vocab_size": 101}
LLAMA = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "intermediate_size": 80,
    "max_position_embeddings": 32,
    "vocab_size": 101,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES = {
    "gpt2": (gpt2.FAMILY, GPT2),
    "gpt2-untied-exact-gelu": (
        gpt2.FAMILY,
        GPT2 | {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 72},
    ),
    "llama": (llama.FAMILY, LLAMA),
    "llama-query-groups": (llama.FAMILY, LLAMA | {"num_key_value_heads": 2, "head_dim": 10}),
    "llama3-scaling": (
        llama.FAMILY,
        LLAMA | {"num_key_value_heads": 3, "rope_parameters": SCALED},
    ),
    "llama-attention-bias": (llama.FAMILY, LLAMA | {"attention_bias": True}),
    "llama-mlp-bias": (llama.FAMILY, LLAMA | {"mlp_bias": True}),
    "llama-tied-biases": (
        llama.FAMILY,
        LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
}


@dataclass
class Pair:
    """A model of transformers and ours with the same weights."""

    family: Family
    theirs: Any
    ours: GPT

    def from_theirs(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Maps tensors shaped like their weights to ours, with zeros for the padded vocabulary."""
        rows = self.family.active_rows(self.ours.config)
        mapped = dict(apply_rows(rows, self.ours.config, tensors, ignored=self.family.ignored))
        table = collect_shardings(self.ours)
        padded = {}
        for name, tensor in mapped.items():
            padded[name] = tensor.new_zeros(table[name].local_shape(self.ours.mesh))
            padded[name][: len(tensor)] = tensor
        return padded


def random_model(family: Family, settings: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    kinds = {
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }
    config, kind = kinds[family.name]
    no_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    model = kind(config(**settings, **(no_dropout if family.name == "gpt2" else {})))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = "norm" in name or "ln_" in name
            parameter.normal_(1.0 if gain and name.endswith("weight") else 0.0, 0.15)
    return model


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def pair(request: pytest.FixtureRequest) -> Pair:
    family, settings = request.param
    theirs = random_model(family, settings)
    config = family.config_from_hf(theirs.config.to_dict())
    pair = Pair(family, theirs, GPT(config, Mesh.single()))
    weights = {name: value.detach() for name, value in theirs.named_parameters()}
    pair.ours.load_state_dict(pair.from_theirs(weights))
    return pair


def batch(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    text = torch.randint(101, (2, 25), generator=generator)
    return text[:, :-1], text[:, 1:]


def their_loss(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(tokens).logits
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, name: str = "") -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4, msg=lambda text: f"{name} {text}")


def test_logits_are_equal(pair):
    tokens, _ = batch()
    logits = pair.ours(tokens)[..., : pair.ours.config.vocab_size].transpose(0, 1)
    assert logits.abs().max() > 1  # otherwise the comparison would be weak
    assert_close(logits, pair.theirs(tokens).logits)


def test_gradients_are_equal(pair):
    tokens, labels = batch()
    pair.ours.loss(tokens, labels).mean().backward()
    their_loss(pair.theirs, tokens, labels).backward()
    theirs = {name: parameter.grad for name, parameter in pair.theirs.named_parameters()}
    wanted = pair.from_theirs(theirs)
    ours = dict(pair.ours.named_parameters())
    assert sorted(wanted) == sorted(ours)
    for name, grad in wanted.items():
        assert grad.abs().max() > 1e-3, name
        assert_close(ours[name].grad, grad, name)


def test_twenty_steps_of_adamw_give_the_same_losses(pair):
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        for model in (pair.ours, pair.theirs)
    ]
    losses = []
    for step in range(20):
        tokens, labels = batch(step % 4)
        both = (pair.ours.loss(tokens, labels).mean(), their_loss(pair.theirs, tokens, labels))
        for loss, optimizer in zip(both, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append([loss.item() for loss in both])
    ours, theirs = torch.tensor(losses).T
    assert ours[-1] < ours[0] - 0.1
    assert_close(ours, theirs)


def test_a_model_of_ours_exports_to_transformers(pair, tmp_path):
    config: GPTConfig = pair.ours.config
    model = GPT(config, Mesh.single(), seed=7)
    views = parameter_views(model, collect_shardings(model), model.mesh)
    record = ModelRecord(family=pair.family.name, **record_of(config))
    CheckpointStore(tmp_path / "run").save(3, dict(views), model=record)
    folder = export_hf(tmp_path / "run", tmp_path / "exported")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(loaded) is type(pair.theirs)
    tokens, _ = batch()
    with torch.no_grad():
        logits = model(tokens)[..., : config.vocab_size].transpose(0, 1)
        assert_close(logits, loaded(tokens).logits)


def test_a_file_of_theirs_imports_into_our_model(pair, tmp_path):
    pair.theirs.save_pretrained(tmp_path / "theirs")
    checkpoint = Checkpoint(import_hf(tmp_path / "theirs", tmp_path / "run"))
    config = GPTConfig.from_dict(checkpoint.model.config)
    assert config == pair.ours.config
    model = GPT(config, Mesh.single())
    checkpoint.load(parameter_views(model, collect_shardings(model), model.mesh))
    wanted = pair.ours.state_dict()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, wanted[name]), name
