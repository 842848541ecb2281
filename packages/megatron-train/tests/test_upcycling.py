"""Checkpoints with experts that are made from a dense one, compared with their definition."""

import pytest
import torch
from megatron_ckpt import CheckpointStore, ModelRecord, View, find_checkpoint
from megatron_models import GPTConfig, record_of
from megatron_train.cli import main
from megatron_train.upcycling import Upcycled, upcycle_checkpoint

CONFIG = GPTConfig(
    num_layers=1,
    hidden_size=8,
    num_attention_heads=2,
    vocab_size=16,
    max_position_embeddings=8,
    ffn_hidden_size=12,
    activation="swiglu",
    add_bias_linear=False,
    normalization="RMSNorm",
    position_embedding_type="rope",
    untie_embeddings_and_output_weights=True,
)
EXPERTS, ROUTER = "layers.0.mlp.experts", "layers.0.mlp.router.weight"


@pytest.fixture
def dense(tmp_path, monkeypatch):
    """Saves a dense model of the family llama with random weights; returns the weights."""
    monkeypatch.chdir(tmp_path)
    draw = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(tuple(spec.sharding.shape), generator=draw).double()
        for name, spec in CONFIG.parameters().items()
    }
    state = {name: [View.whole(tensor)] for name, tensor in weights.items()}
    model = ModelRecord(family="llama", **record_of(CONFIG))
    CheckpointStore("dense").save(3, state | {"run": {}}, model=model)
    return weights


def read(folder):
    checkpoint = find_checkpoint(folder)
    return checkpoint, {name: checkpoint.read_tensor(name) for name in checkpoint.tensors}


@pytest.mark.parametrize(("granularity", "factor"), [(1, 1), (2, 2)])
def test_experts_are_copies_or_slices_of_the_feed_forward_layer(dense, granularity, factor):
    changes = {"num_experts": 4, "moe_router_topk": 2}
    options = {} if granularity == 1 else {"granularity": granularity}
    made = upcycle_checkpoint("dense", "moe", changes, **options)
    checkpoint, weights = read("moe")
    assert made == Upcycled(checkpoint.path, True, "llama") and checkpoint.iteration == 3
    assert checkpoint.model.family is None and checkpoint.model.config["num_experts"] == 4
    for name in ("layers.0.attention.qkv.weight", "final_norm.weight"):
        assert torch.equal(weights[name], dense[name])
    width = 12 // granularity
    down = dense["layers.0.mlp.down.weight"]
    for expert in range(4):
        first = expert % granularity * width
        part = slice(first, first + width)
        found = weights[f"{EXPERTS}.down.weight"][expert]
        torch.testing.assert_close(found, factor * down[:, part], rtol=1e-12, atol=0)
    rows = weights[ROUTER]
    assert len(rows.unique(dim=0)) == 4 // granularity


def test_routers_depend_on_the_seed_which_is_that_of_a_run_by_default(dense):
    changes, routers = {"num_experts": 4}, {}
    for name, options in (("a", {}), ("b", {"seed": 1234}), ("c", {"seed": 1233})):
        upcycle_checkpoint("dense", name, changes, **options)
        routers[name] = read(name)[1][ROUTER]
    assert torch.equal(routers["a"], routers["b"]) and not torch.equal(routers["a"], routers["c"])
    assert main(["upcycle", "--load", "dense", "--save", "d", "--num-experts", "4"]) == 0
    assert (
        main(["upcycle", "--load", "dense", "--save", "e", "--num-experts", "4", "--seed", "1233"])
        == 0
    )
    assert torch.equal(read("d")[1][ROUTER], routers["a"])
    assert torch.equal(read("e")[1][ROUTER], routers["c"])


def test_the_command_reports_what_the_model_loses(dense, capsys):
    lost = "the family llama has no models with these experts; the checkpoint names no family\n"
    unequal = "the weights of a token's experts have no fixed sum with this router, so outputs"
    for number, (words, found) in enumerate(
        (
            ("--moe-router-topk 2", (True, False, None)),
            ("--moe-router-pre-softmax", (True, True, None)),
            ("--model-family mixtral", (False, False, "mixtral")),
        )
    ):
        assert main(f"upcycle --load dense --save m{number} --num-experts 4 {words}".split()) == 0
        printed = capsys.readouterr().out
        checkpoint = find_checkpoint(f"m{number}")
        family, exact, kept = found
        assert (lost in printed, unequal in printed, checkpoint.model.family) == found
        assert printed.endswith(f"saved upcycled checkpoint {checkpoint.path}\n")
        assert printed.count("\n") == 1 + family + exact, kept
    assert checkpoint.model.config["moe_router_topk"] == 2  # the default


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("--num-experts 4 --model-family gpt2", 1, "--model-family gpt2: models of this family"),
        ("--num-experts 4 --moe-upcycling-granularity 5", 1, "5 does not divide --ffn-hidden-s"),
        ("--num-experts 4 --moe-upcycling-granularity -1", 2, "granularity needs an integer"),
        ("--num-experts 4 --seed 1.5", 2, "--seed needs an integer, got '1.5'"),
        ("--num-experts 4 --num-layers 1", 2, "--num-layers"),
        ("--num-experts 4 --save dense", 1, "--save dense already has a checkpoint (dense/iter_"),
        ("", 1, "upcycling needs experts; set --num-experts"),
    ],
)
@pytest.mark.usefixtures("dense")
def test_what_cannot_be_upcycled_is_refused_in_one_line(words, status, message, capsys):
    assert main(f"upcycle --load dense --save moe {words}".split()) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-train: error: ") and message in line


def test_adapters_must_be_merged_first(dense, capsys):
    state = {name: [View.whole(tensor)] for name, tensor in dense.items()}
    record = {"run": {"objective": {"linear_product": "lora"}}}
    model = ModelRecord(family=None, **record_of(CONFIG))
    CheckpointStore("tuned").save(3, state | record, model=model)
    assert main(["upcycle", "--load", "tuned", "--save", "moe", "--num-experts", "4"]) == 1
    line = "was saved with --linear-product lora; merge it into the weights first, with megatron-"
    assert line in capsys.readouterr().err
