"""Runs with update rules other than AdamW continue bit for bit, and only with the same rule."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron_ckpt import find_checkpoint
from megatron_models import find_kind
from megatron_train.cli import main
from megatron_train.metrics.records import read_records

RUN = """--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8
    --micro-batch-size 2 --train-iters 4 --mock-data --tokenizer-type NullTokenizer --vocab-size 40
    --eval-iters 0 --log-interval 4 --lr 1e-2 --device cpu --no-progress"""

PROGRAM = [sys.executable, "-m", "megatron_train"]


@pytest.fixture
def train(tmp_path, monkeypatch, capsys, plain_runs):
    monkeypatch.chdir(tmp_path)

    def run(words, status=0):
        capsys.readouterr()
        assert main(f"pretrain gpt {RUN} {words}".split()) == status
        return capsys.readouterr()

    return run


def losses(folder):
    return [record["lm loss"] for record in read_records(Path(folder, "metrics.jsonl")).train]


@pytest.mark.parametrize(
    "rule",
    [
        "--optimizer sgd",
        "--optimizer sgd --sgd-momentum 0",
        "--optimizer lion",
        "--optimizer muon",
        "--optimizer adafactor",
    ],
)
def test_a_stopped_run_continues_bit_for_bit_only_with_its_rule(train, rule):
    train(f"{rule} --save whole")
    train(f"{rule} --save stopped --exit-interval 2")
    refused = train("--save stopped --load stopped", 1).err
    kept = {
        "lion": "exp_avg",
        "0": "none",
        "sgd": "momentum_buffer",
        "muon": "exp_avg, exp_avg_sq, momentum_buffer",
        "adafactor": "col_var, row_var, variance",
    }[rule.split()[-1]]
    assert refused.splitlines()[-1] == (
        f"megatron-train: error: stopped/iter_0000002 was saved with another update rule: it "
        f"has the optimizer state {kept}, and --optimizer adam has exp_avg, exp_avg_sq; give the "
        "--optimizer that it was saved with, or --no-load-optim to begin with a new state"
    )
    train(f"{rule} --save stopped --load stopped")
    assert losses("stopped") == losses("whole") and len(losses("whole")) == 4
    one, other = find_checkpoint("whole"), find_checkpoint("stopped")
    assert one.tensors.keys() == other.tensors.keys()
    for name in one.tensors:
        assert torch.equal(one.read_tensor(name), other.read_tensor(name)), name
    train("--save stopped --load stopped --train-iters 5 --no-load-optim --lr-decay-iters 4")
    assert len(losses("stopped")) == 5


def options(folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return {"cwd": folder, "capture_output": True, "text": True, "env": environment}


def test_a_run_prints_the_parameter_groups_of_all_its_ranks(tmp_path, preloaded):
    command = f"{RUN} --lr-mult layers.1.*=0.5 --decoupled-lr 1e-3 --save out"
    command = command.replace("--num-layers 1", "--num-layers 2 --pipeline-model-parallel-size 2")
    words = [*PROGRAM, "pretrain", "gpt", "--nproc-per-node", "2", *command.split()]
    done = preloaded.run(words, **options(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    at = lines.index("parameter groups:")
    rows = [re.split(r" {2,}", line.strip()) for line in lines[at + 1 : at + 7]]
    model = find_kind("gpt").config(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        vocab_size=41,
        max_position_embeddings=8,
    )
    counts = {}
    for name, spec in model.parameters().items():
        rate = "0.5 x --lr" if name.startswith("layers.1.") else "1 x --lr"
        rate = "1 x --decoupled-lr" if spec.sharding.vocabulary else rate
        decay = (
            "1 x --weight-decay" if len(spec.sharding.shape) > 1 and "bias" not in name else "none"
        )
        tensors, numel = counts.get((rate, decay), (0, 0))
        counts[rate, decay] = tensors + 1, numel + spec.numel
    found = {(row[1], row[2]): (int(row[3]), int(row[4].replace(",", ""))) for row in rows[1:]}
    assert rows[0] == ["rule", "learning rate", "weight decay", "tensors", "parameters"]
    assert found == counts


def test_a_step_of_lion_never_waits_and_has_one_state_tensor(tmp_path):
    shape = RUN.split("--train-iters", maxsplit=1)[0]
    command = f"dry-run gpt {shape} --vocab-size 40 --optimizer lion --on cuda --json"
    command += " --hidden-dropout 0 --attention-dropout 0"
    # A forked process cannot imagine a CUDA device.
    done = subprocess.run([*PROGRAM, *command.split()], **options(tmp_path))
    assert done.returncode == 0, done.stderr
    (rank,) = json.loads(done.stdout)["of_ranks"]
    assert rank["waits"] == {} and rank["kernels"]["_foreach_sign_"] == 3  # one for each group
    assert rank["memory"]["optimizer state"] == rank["memory"]["parameters"]
