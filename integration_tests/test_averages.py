"""Averages of weights in runs: equal in every layout, saved, restored and evaluated."""

import re

import pytest
import torch
from megatron_ckpt import Checkpoint

DECAY = 0.75
STEPS = 4
EMA = f"--float64 --ema-decay {DECAY}"
RUN = (
    "pretrain gpt --mock-data --tokenizer-type NullTokenizer --vocab-size 101 --split 9,1,0 "
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --lr 1e-2 "
    "--micro-batch-size 1 --global-batch-size 4 --lr-decay-style constant --log-interval 1 "
    f"--train-iters {STEPS} --eval-interval {STEPS} --eval-iters 2 --device cpu --no-progress"
)
LAYOUTS = {
    "dp2": "--nproc-per-node 2",
    "dp2, distributed": "--nproc-per-node 2 --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather",
    "tp2": "--nproc-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel",
    "fully sharded": "--nproc-per-node 2 --use-torch-fsdp2",
    "pp2": "--nproc-per-node 2 --pipeline-model-parallel-size 2",
}


@pytest.fixture(scope="module")
def train(run_command, tmp_path_factory):
    """Returns a function that runs until a step; it returns the output."""
    here = tmp_path_factory.mktemp("here")

    def run(folder, options, steps=STEPS):
        early = f"--exit-interval {steps}" if steps < STEPS else ""
        line = f"megatron-train {RUN} {options} --save {folder} --load {folder} {early}"
        done = run_command(here, line)
        return done.stdout + done.stderr

    return run


def tensors(folder, step=STEPS):
    checkpoint = Checkpoint(folder / f"iter_{step:07d}")
    return {name: checkpoint.read_tensor(name) for name in checkpoint.tensors}


def evaluations(output):
    """Returns the losses of all evaluations."""
    found = [float(loss) for loss in re.findall(r"lm loss value: (\S+)", output)]
    assert found
    return found


@pytest.fixture(scope="module")
def one_rank(train, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return folder, train(folder, f"{EMA} --save-interval 1")


def test_the_averages_follow_the_formula_from_the_initial_weights(one_rank):
    folder, _ = one_rank
    first, *others = (tensors(folder, step) for step in range(1, STEPS + 1))
    names = [name for name in first if name.endswith(".ema")]
    assert len(names) == sum(1 for name in first if f"{name}.ema" in first) > 10
    for before, after in zip([first, *others], others, strict=False):
        for name in names:
            wanted = DECAY * before[name] + (1 - DECAY) * after[name.removesuffix(".ema")]
            torch.testing.assert_close(after[name], wanted, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(
    "layout",
    [
        "dp2, distributed",
        "tp2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("dp2", "fully sharded", "pp2")),
    ],
)
def test_averages_and_their_evaluation_equal_those_of_one_rank(train, one_rank, layout, tmp_path):
    folder, output = one_rank
    found = train(tmp_path, f"{EMA} {LAYOUTS[layout]}")
    wanted = tensors(folder)
    for name, tensor in tensors(tmp_path).items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-9, msg=name)
    assert evaluations(found) == pytest.approx(evaluations(output), abs=1e-6)


def test_evaluations_use_the_averages_unless_the_trained_weights_are_asked_for(
    train, one_rank, tmp_path
):
    folder, output = one_rank
    assert f"iteration {STEPS} with averaged weights" in output
    trained = train(tmp_path / "t", f"{EMA} --ema-evaluate trained")
    without = train(tmp_path / "w", "--float64")
    assert "averaged" not in trained
    assert evaluations(trained) == evaluations(without) != evaluations(output)
    weights = tensors(tmp_path / "w")
    assert all(torch.equal(tensors(folder)[name], tensor) for name, tensor in weights.items())


def test_a_continued_run_has_the_same_averages_and_begins_or_ends_them_with_a_warning(
    train, one_rank, tmp_path
):
    train(tmp_path, EMA, steps=2)
    train(tmp_path, EMA)
    wanted, found = tensors(one_rank[0]), tensors(tmp_path)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    other = tmp_path / "other"
    train(other, "--float64", steps=2)
    assert "has no averages of weights: they begin with its weights" in train(other, EMA, steps=3)
    assert "has averages of weights, which end here" in train(other, "--float64")
    assert not any(name.endswith(".ema") for name in tensors(other))
