"""Low-rank adapters: training, continuing, merging and exporting a checkpoint's model."""

from pathlib import Path

import pytest
import torch
from megatron_ckpt import Checkpoint, CheckpointError, find_checkpoint
from megatron_ckpt.cli import main as convert
from megatron_infer import load_model
from megatron_train import read_records
from megatron_train.cli import main

ROLES = "linear_qkv linear_fc1 linear_fc2"
SIZES = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
TRAIN = (
    f"pretrain gpt {SIZES} --mock-data --tokenizer-type NullTokenizer --vocab-size 211 "
    "--micro-batch-size 2 --global-batch-size 4 --eval-iters 0 --hidden-dropout 0 --lr 1e-2 "
    "--attention-dropout 0 --lr-decay-style constant --no-progress --float64 --device cpu "
    "--activation gelu_tanh"
)
LORA = f"--linear-product lora --lora-rank 4 --lora-alpha 8 --lora-target-modules {ROLES}"
RANKS = "--nproc-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel"


@pytest.fixture
def train(train_in, tmp_path):
    """Returns a function that runs `pretrain gpt` and returns its output."""
    run = train_in(tmp_path)
    return lambda words, status=0: run(f"{TRAIN} {words}", status)


@pytest.fixture
def base(train):
    """Returns the folder of a run of two steps, whose model is to be adapted."""
    train("--train-iters 2 --save base")
    return "base"


def weights(folder: str) -> dict[str, torch.Tensor]:
    checkpoint: Checkpoint = find_checkpoint(folder)
    records = checkpoint.tensors.items()
    return {
        name: checkpoint.read_tensor(name) for name, record in records if record.group == "model"
    }


def losses(folder: str) -> list[float]:
    return [record["lm loss"] for record in read_records(Path(folder) / "metrics.jsonl").train]


def test_adapters_are_trained_continued_in_other_layouts_and_merged(train, base, capfd):
    begin = f"--finetune --load {base} {LORA} --train-iters 6"
    assert "with the weights of base, step 2" in train(f"{begin} --save whole")
    before, after = weights(base), weights("whole")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    added = after.keys() - before.keys()
    assert len(added) == 2 * 2 * 3 and all(after[name].any() for name in added)
    kept = {n for n, r in find_checkpoint("whole").tensors.items() if r.group == "optim"}
    assert {name.rpartition(".")[0] for name in kept} == added

    train(f"{begin} --save same --exit-interval 3")
    train(f"{LORA} --train-iters 6 --load same --save same")
    assert losses("same") == losses("whole")
    assert all(torch.equal(after[name], tensor) for name, tensor in weights("same").items())

    train(f"{begin} --save cut --exit-interval 3 {RANKS}")
    train(f"{LORA} --train-iters 6 --load cut --save cut")
    assert losses("cut") == pytest.approx(losses("whole"), abs=1e-9)
    for name, tensor in weights("cut").items():
        torch.testing.assert_close(tensor, after[name], rtol=0, atol=1e-9, msg=name)

    assert main(["merge", "--load", "whole", "--save", "merged"]) == 0
    assert main(["merge", "--load", "cut", "--save", "merged"]) == 1
    assert "already has a checkpoint (" in capfd.readouterr().err
    merged = weights("merged")
    assert merged.keys() == before.keys()
    for name, tensor in before.items():
        wanted, stem = tensor, name.removesuffix("weight")
        if f"{stem}lora_a" in added:
            a, b = after[f"{stem}lora_a"], after[f"{stem}lora_b"]
            wanted = tensor + 2.0 * torch.tensordot(b, a, dims=1)
        torch.testing.assert_close(merged[name], wanted, rtol=0, atol=1e-14, msg=name)
    assert convert(["convert", "--to-hf", "--family", "gpt2", "merged", "out"]) == 0
    assert convert(["convert", "--to-hf", "--family", "gpt2", "whole", "other"]) == 1
    line = capfd.readouterr().err
    assert "no row uses tensor 'layers.0.attention.qkv.lora_a'" in line
    assert "merge it into the weight first (megatron-train merge)" in line
    with pytest.raises(
        CheckpointError, match=r"does not exist in the model: layer .* \(megatron-train merge"
    ):
        load_model("whole", tokenizer=None)


def test_what_does_not_fit_an_adapted_model_is_refused(train, base):
    train(f"--finetune --load {base} {LORA} --train-iters 1 --save tuned")
    for words, message in (
        ("--load tuned", "was saved with --linear-product lora, but this run has plain; g"),
        (
            "--load tuned --finetune",
            "or merge it into the weights first, with megatron-train merge",
        ),
        (f"--load {base} {LORA}", "begin a new run with its weights, with --finetune"),
        (
            f"--load tuned {LORA} --lora-rank 2",
            "of --linear-product lora: --lora-rank 4 in the checkpoint and 2",
        ),
        (
            f"--load tuned {LORA} --lora-alpha 9",
            "lora.alpha 8.0 in the checkpoint and 9.0 in this run",
        ),
        ("--lora-rank 2", "--lora-rank is a setting of the product lora, but the run uses plain"),
        (f"{LORA} --lora-rank 0", "--lora-rank 0 must be at least 1"),
        ("--linear-product lara", "no product of linear layers 'lara'; did you mean 'lora'?"),
        (f"{LORA} --lora-target-modules q_proj", "is set for q_proj, but a model of kind gpt"),
        (f"{LORA} --use-torch-fsdp2 --nproc-per-node 2", "freezes weights, but --use-torch-fsdp2"),
    ):
        assert message in train(f"{words} --train-iters 2", status=1), words
    assert main(["merge", "--load", "base", "--save", "x"]) == 1


@pytest.mark.parametrize("layout", ["pipeline", "tensor"])
def test_a_stage_without_an_adapter_is_frozen_too(train, base, layout):
    only = "--linear-product lora --lora-rank 4 --lora-target-modules linear_fc2"
    begin = f"--finetune --load {base} {only} --train-iters 3"
    train(f"{begin} --save one")
    ranks = f"--nproc-per-node 2 --{layout}-model-parallel-size 2"
    if layout == "pipeline":  # the first stage has no layer and therefore no adapter
        ranks += " --pipeline-model-parallel-layout E|ttL --use-distributed-optimizer"
    train(f"{begin} --save two {ranks}")
    assert losses("two") == pytest.approx(losses("one"), abs=1e-9)
    one, two, before = weights("one"), weights("two"), weights(base)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-9, msg=name)
    assert all(torch.equal(two[name], tensor) for name, tensor in before.items())
