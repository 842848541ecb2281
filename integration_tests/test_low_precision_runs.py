"""Runs in FP8: continuing with histories of magnitudes, and checkpoints without them."""

from pathlib import Path

import pytest
import torch
from megatron_ckpt import find_checkpoint
from megatron_ckpt.cli import main as convert
from megatron_train import read_records

TRAIN = (
    "pretrain gpt --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 211 --micro-batch-size 2 "
    "--global-batch-size 4 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0 --lr 1e-2 "
    "--lr-decay-style constant --no-progress --float64 --device cpu --activation gelu_tanh"
)
FP8 = "--fp8-format hybrid --fp8-amax-history-len 3 --fp8-amax-compute-algo max"


@pytest.fixture
def train(train_in, tmp_path):
    """Returns a function that runs `pretrain gpt` and returns its output."""
    run = train_in(tmp_path)
    return lambda words, status=0: run(f"{TRAIN} {words}", status)


def losses(folder: str) -> list[float]:
    return [record["lm loss"] for record in read_records(Path(folder) / "metrics.jsonl").train]


def histories(folder: str) -> dict[str, torch.Tensor]:
    checkpoint = find_checkpoint(folder)
    return {
        name: checkpoint.read_tensor(name)
        for name in checkpoint.tensors
        if name.endswith(".amax_history")
    }


def test_a_run_continues_with_its_histories(train, tmp_path):
    output = train(f"{FP8} --train-iters 6 --save whole")
    assert "linear layers multiply in fp8 delayed (hybrid), with the backend reference" in output
    kept = histories("whole")
    assert len(kept) == 8
    assert all(history.shape == (3, 3) and (history > 0).all() for history in kept.values())
    records = find_checkpoint("whole").tensors
    assert {records[name].group for name in kept} == {"optim"}

    train(f"{FP8} --train-iters 6 --save part --exit-interval 3")
    output = train(f"{FP8} --train-iters 6 --load part --save part")
    assert "magnitudes" not in output
    assert losses("part") == losses("whole")
    assert all(torch.equal(history, kept[name]) for name, history in histories("part").items())

    assert convert(["convert", "whole", "hf", "--to-hf"]) == 0
    assert (tmp_path / "hf" / "model.safetensors").is_file()


def test_a_run_continues_in_another_precision_of_its_products(train):
    train("--train-iters 2 --save plain")
    output = train(f"{FP8} --train-iters 4 --lr-decay-iters 2 --load plain --save few")
    assert "no history of magnitudes" in output
    assert "for 8 of 8 weights" in output
    assert len(histories("few")) == 8
    assert "magnitudes" not in train("--train-iters 5 --lr-decay-iters 2 --load few --save back")
    assert not histories("back")
    begin = f"{FP8} --finetune --load few --train-iters 1 --save new"
    assert "magnitudes" not in train(begin)


EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16"
LAYOUTS = {
    "tensor parallel": ("", "--tensor-model-parallel-size 2 --sequence-parallel"),
    # Experts are on ranks that have parts of the other layers and of the sequence.
    "experts": (
        EXPERTS,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1 --moe-token-dispatcher-type allgather",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_have_the_losses_of_one(train, layout):
    model, ranks = LAYOUTS[layout]
    train(f"{FP8} {model} --train-iters 3 --save one")
    train(f"{FP8} {model} --train-iters 3 --save two --nproc-per-node 2 {ranks}")
    # In the first step, a rank's own scales round subnormal numbers otherwise.
    assert losses("two") == pytest.approx(losses("one"), abs=1e-6)
    for name, history in histories("two").items():
        torch.testing.assert_close(history, histories("one")[name], rtol=1e-4, atol=1e-9)
    assert any(".experts." in name for name in histories("two")) == bool(model)


def test_a_run_in_fp4_continues_with_the_same_rounding(train):
    """Gradients are rounded stochastically, by a hash that needs no state."""
    train("--fp4-format e2m1 --train-iters 4 --save whole")
    train("--fp4-format e2m1 --train-iters 4 --save part --exit-interval 2")
    train("--fp4-format e2m1 --train-iters 4 --load part --save part")
    assert losses("part") == losses("whole")
