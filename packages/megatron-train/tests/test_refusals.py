"""Wrong command lines end with one line and a status before torch, and thus memory, is loaded."""

import json
import subprocess
import sys

import pytest

BASE = {
    "--num-layers": "4",
    "--hidden-size": "16",
    "--num-attention-heads": "4",
    "--seq-length": "16",
    "--vocab-size": "61",
    "--micro-batch-size": "2",
    "--train-iters": "2",
    "--lr": "1e-3",
    "--eval-iters": "0",
    "--mock-data": "",
}
EXPERTS = {"--num-experts": "8"}
CASES = {
    "query groups": (
        {"--group-query-attention": "", "--num-query-groups": "3"},
        1,
        "--num-attention-heads 4 is not a multiple of --num-query-groups 3|2 or 4",
    ),
    "heads on ranks": (
        {"--tensor-model-parallel-size": "3", "WORLD_SIZE": "3"},
        1,
        "--tensor-model-parallel-size 3 cannot cut --num-attention-heads 4 into 3 equal parts; use "
        "--tensor-model-parallel-size 2 or 4",
    ),
    "layers on stages": (
        {"--pipeline-model-parallel-size": "3", "WORLD_SIZE": "3"},
        1,
        "4 layers cannot be split evenly over 3 stages: use 3 or 6 layers",
    ),
    "a sequence on ranks": (
        {"--context-parallel-size": "3", "WORLD_SIZE": "3"},
        1,
        "--seq-length 16 cannot be split into 2 x 3 equal slices|use 12 or 18",
    ),
    "sequence parallelism": (
        {
            "--seq-length": "15",
            "--sequence-parallel": "",
            "--tensor-model-parallel-size": "2",
            "WORLD_SIZE": "2",
        },
        1,
        "--seq-length 15 cannot be split into 2 equal slices for --sequence-parallel; use 14 or 16",
    ),
    "experts on ranks": (
        {**EXPERTS, "--expert-model-parallel-size": "3", "WORLD_SIZE": "3"},
        1,
        "--expert-model-parallel-size 3 cannot cut --num-experts 8 into 3 equal parts|2 or 4",
    ),
    "ranks": (
        {"--tensor-model-parallel-size": "2", "WORLD_SIZE": "3"},
        1,
        "--tensor-model-parallel-size 2 needs a multiple of 2 ranks, but there are 3",
    ),
    "a batch": (
        {"--global-batch-size": "5"},
        1,
        "--global-batch-size 5 is not a multiple of --micro-batch-size 2; use 4 or 6",
    ),
    "groups of experts": (
        {
            **EXPERTS,
            "--moe-router-num-groups": "3",
            "--moe-router-group-topk": "1",
            "--moe-router-pre-softmax": "",
        },
        1,
        "--moe-router-num-groups 3 does not divide --num-experts 8; use 2 or 4",
    ),
    "latents": (
        {"--kv-lora-rank": "8"},
        1,
        "--kv-lora-rank 8 has no effect without --multi-latent-attention; leave it at 32",
    ),
    "windows": (
        {"--sliding-window": "4", "--window-attn-skip-freq": "1"},
        1,
        "--window-attn-skip-freq 1 leaves no layer with --sliding-window 4; set --sliding-window",
    ),
    "a scaling": (
        {"--position-embedding-type": "rope", "--rope-scaling-type": "yam"},
        2,
        "--rope-scaling-type needs one of none, linear, ntk, dynamic, llama3, yarn, longrope, got",
    ),
    "multi-token prediction": (
        {"--mtp-loss-scaling-factor": "0.3"},
        1,
        "--mtp-loss-scaling-factor 0.3 has no effect without --mtp-num-layers; set it to 1",
    ),
    "a layer": (
        {"--heterogeneous-layers-config-encoded-json": '[{"mlp":{"ffn_mult":-1}},{},{},{}]'},
        1,
        "--heterogeneous-layers-config-encoded-json: layer 0, mlp: ffn_mult must be|not -1",
    ),
    "no number": ({"--hidden-size": "wide"}, 2, "--hidden-size|an integer|'wide'"),
}
SCRIPT = """\
import contextlib, io, json, os, sys
sys.modules["torch"] = None  # every import of it fails
from megatron_train.cli import main
report = {}
for name, words in json.load(sys.stdin).items():
    os.environ["WORLD_SIZE"] = words.pop("WORLD_SIZE", "1")
    line = [word for pair in words.items() for word in pair if word]
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main(["pretrain", "gpt", *line])
        except SystemExit as end:
            status = end.code
    report[name] = [status, stderr.getvalue()]
json.dump(report, sys.stdout)
"""


@pytest.fixture(scope="module")
def outcomes():
    """Returns status and standard error of each command, run in a process without torch."""
    words = {name: {**BASE, **changes} for name, (changes, _, _) in CASES.items()}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(words),
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_command_is_refused_without_torch(outcomes, name):
    status, error = outcomes[name]
    _, expected, words = CASES[name]
    assert (status, error.count("\n")) == (expected, 1), error
    assert error.startswith("megatron-train: error: ")
    for word in words.split("|"):
        assert word in error
