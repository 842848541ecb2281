"""`megatron-train upcycle`: the model with experts computes what the dense one computes."""

from pathlib import Path

import pytest
import torch
from megatron_ckpt import find_checkpoint
from megatron_infer import load_model
from megatron_train import read_records

SIZES = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16"
TUNE = "finetune gpt --seq-length 16 --pretrained-checkpoint"
DATA = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 31 --micro-batch-size 2 --lr 1e-3 "
    "--eval-iters 0 --no-progress --float64 --device cpu --hidden-dropout 0 --attention-dropout 0"
)
DENSE = f"pretrain gpt {SIZES} {DATA} --ffn-hidden-size 24 --train-iters 2 --init-method-std 0.3"
LLAMA = (
    "--activation swiglu --disable-bias-linear --normalization RMSNorm --model-family llama "
    "--position-embedding-type rope --untie-embeddings-and-output-weights"
)


@pytest.fixture
def start(train_in, tmp_path):
    """Returns a function that runs a command in this process and returns what it prints."""
    return train_in(tmp_path)


def logits(folder: str) -> torch.Tensor:
    model = load_model(folder, dtype=torch.float64).model
    with torch.no_grad():
        return model(torch.arange(24).view(2, 12))


@pytest.mark.parametrize(
    ("dense", "flags", "width"),
    [
        pytest.param("", "--num-experts 4", 24, id="copies"),
        pytest.param(
            "", "--num-experts 6 --moe-router-topk 6 --moe-upcycling-granularity 3", 8, id="biases"
        ),
        pytest.param(
            LLAMA,
            "--num-experts 8 --moe-router-topk 4 --moe-upcycling-granularity 2 "
            "--moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5",
            12,
            id="gated",
        ),
        pytest.param(
            LLAMA,
            "--num-experts 8 --moe-router-topk 2 --moe-upcycling-granularity 2 "
            "--moe-router-num-groups 2 --moe-router-group-topk 1 --moe-layer-freq [0,1]",
            12,
            id="groups",
        ),
    ],
)
def test_logits_equal_those_of_the_dense_model(start, dense, flags, width) -> None:
    start(f"{DENSE} {dense} --save dense")
    printed = start(f"upcycle --load dense --save moe {flags}")
    assert printed.splitlines()[-1].startswith("saved upcycled checkpoint moe")
    assert "no fixed sum" not in printed
    made = find_checkpoint(Path("moe"))
    assert made.model.config["moe_ffn_hidden_size"] == width
    assert ("the family llama has no models" in printed) == (
        made.model.family is None and dense != ""
    )
    torch.testing.assert_close(logits("moe"), logits("dense"), rtol=1e-9, atol=1e-9)
    router = made.read_tensor("layers.1.mlp.router.weight")
    assert len(router.unique(dim=0)) == len(router) * width // 24
    for folder in ("dense", "moe"):
        start(f"{TUNE} {folder} {DATA} --train-iters 2 --save {folder}2")
    first, other = (
        read_records(Path(f"{folder}2/metrics.jsonl")).train[0]["lm loss"]
        for folder in ("dense", "moe")
    )
    assert other == pytest.approx(first, rel=1e-9)


def test_routers_without_a_fixed_sum_are_named_and_other_requests_refused(start) -> None:
    start(f"{DENSE} --save dense")
    base = "upcycle --load dense --save moe"
    for flags, message in {
        "": "upcycling needs experts; set --num-experts",
        "--num-experts 4 --moe-upcycling-granularity 5": "5 does not divide --ffn-hidden-size 24",
        "--num-experts 3 --moe-upcycling-granularity 2": "2 does not divide --num-experts 3",
        "--num-experts 4 --moe-router-topk 3 --moe-upcycling-granularity 2": (
            "does not divide --moe-router-topk 3; use a multiple of 2"
        ),
        "--num-experts 4 --model-family mixtral": "--model-family mixtral: models of this family",
        "--num-experts 4 --seed x": "--seed needs an integer, got 'x'",
    }.items():
        printed = start(f"{base} {flags}", 2 if "--seed" in flags else 1)
        assert message in printed and len(printed.splitlines()) == 1, printed
    printed = start(f"{base} --num-experts 4 --moe-router-pre-softmax")
    assert "no fixed sum" in printed
    assert "already has a checkpoint" in start(f"{base} --num-experts 4", 1)
    assert "has --num-experts 4 already" in start("upcycle --load moe --save x --num-experts 4", 1)


def test_a_llama_becomes_a_mixtral(start) -> None:
    start(f"{DENSE} {LLAMA} --save dense")
    start("upcycle --load dense --save moe --num-experts 4 --model-family mixtral")
    assert find_checkpoint(Path("moe")).model.family == "mixtral"
