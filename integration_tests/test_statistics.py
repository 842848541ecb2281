"""Zeros and norms of a run against those of its checkpoints, and equal in every layout."""

import pytest
import torch
from megatron_ckpt import Checkpoint
from megatron_train import read_records
from megatron_train.statistics import part_of

RUN = (
    "pretrain gpt --mock-data --tokenizer-type NullTokenizer --vocab-size 101 --split 9,1,0 "
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --lr 1e-2 "
    "--micro-batch-size 1 --global-batch-size 4 --lr-decay-style constant --log-interval 2 "
    "--train-iters 2 --eval-iters 0 --device cpu --no-progress --float64 --log-layer-norms "
    "--log-params-norm --log-num-zeros-in-grad --log-update-ratios --save-interval 1 "
    "--disable-bias-linear"
)
LAYOUTS = {
    "tp2, distributed": "--nproc-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel",
    "dp2, distributed": "--nproc-per-node 2 --use-distributed-optimizer",
    "pp2": "--nproc-per-node 2 --pipeline-model-parallel-size 2",
    "fully sharded": "--nproc-per-node 2 --use-torch-fsdp2",
}


@pytest.fixture(scope="module")
def train(run_command, tmp_path_factory):
    """Returns a function that runs two steps and returns their records and the output."""
    here = tmp_path_factory.mktemp("here")

    def run(folder, options=""):
        done = run_command(here, f"megatron-train {RUN} {options} --save {folder}")
        return read_records(folder / "metrics.jsonl").train, done.stdout

    return run


@pytest.fixture(scope="module")
def one_rank(train, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return folder, *train(folder)


def measured(record):
    return {n: v for n, v in record.items() if " of " in n or n in ("num zeros", "params norm")}


def test_norms_of_layers_are_those_of_the_saved_weights_and_add_up(one_rank):
    folder, (first, second), output = one_rank
    assert measured(first) == {}
    checkpoint = Checkpoint(folder / "iter_0000002")
    squares, whole = {}, 0.0
    for name, record in checkpoint.tensors.items():
        if record.group == "model":
            square = checkpoint.read_tensor(name).square().sum().item()
            whole += square
            squares[part_of(name)] = squares.get(part_of(name), 0.0) + square
    assert {"layers.0", "layers.1"} < squares.keys()
    found = measured(second)
    for part, square in squares.items():
        assert found[f"params norm of {part}"] == pytest.approx(square**0.5, rel=1e-12)
    assert found["params norm"] == pytest.approx(whole**0.5, rel=1e-12)
    gradient = sum(found[f"grad norm of {part}"] ** 2 for part in squares)
    assert second["grad_norm"] == pytest.approx(gradient**0.5, rel=1e-12)
    assert f"params norm: {whole**0.5:.3f} |" in output
    assert f"num zeros: {found['num zeros']:.1f} |" in output


def test_update_ratios_are_those_of_the_saved_weights(one_rank):
    folder, (_, second), _ = one_rank
    before, after = (Checkpoint(folder / f"iter_000000{number}") for number in (1, 2))
    updates, weights = {}, {}
    for name, record in after.tensors.items():
        if record.group == "model":
            old, new = before.read_tensor(name), after.read_tensor(name)
            part = part_of(name)
            weights[part] = weights.get(part, 0.0) + old.square().sum().item()
            updates[part] = updates.get(part, 0.0) + (new - old).square().sum().item()
    found = measured(second)
    assert {"layers.0", "layers.1"} < updates.keys()
    for part, square in updates.items():
        wanted = (square / weights[part]) ** 0.5
        assert found[f"update ratio of {part}"] == pytest.approx(wanted, rel=1e-9)


def test_parameters_that_a_product_adds_belong_to_their_layers(train, tmp_path):
    found = measured(train(tmp_path, "--linear-product lora")[0][1])
    layers = [f"grad norm of layers.{number}" for number in range(2)]
    assert all(found[name] > 0 for name in layers)
    # The others are frozen.
    assert {name for name, norm in found.items() if "grad" in name and norm} == {*layers}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=[pytest.mark.slow] * (each == "fully sharded")) for each in LAYOUTS],
)
def test_every_layout_measures_the_same(train, one_rank, layout, tmp_path):
    wanted = measured(one_rank[1][1])
    found = measured(train(tmp_path, LAYOUTS[layout])[0][1])
    assert found.keys() == wanted.keys()
    torch.testing.assert_close(
        torch.tensor([found[name] for name in wanted], dtype=torch.float64),
        torch.tensor([*wanted.values()], dtype=torch.float64),
        rtol=1e-9,
        atol=0,
    )
