"""Every mistake a person can make is answered with one line and a non-zero exit status."""

import contextlib
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from megatron_data import ByteTokenizer, IndexedDatasetBuilder

SIZES = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16"
LENGTH = "--micro-batch-size 2 --train-iters 3 --eval-iters 0 --no-progress"


def call(command: str) -> int:
    """Run a console script in this process; a traceback would end the test."""
    name, *words = command.split()
    (script,) = entry_points(group="console_scripts", name=name)
    return script.load()(words)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with files in every state a command may find them in."""
    folder = tmp_path_factory.mktemp("errors")
    ByteTokenizer().save(folder / "bytes")
    with IndexedDatasetBuilder(str(folder / "good"), "uint16") as builder:
        for start in range(40):
            builder.add_item([(start + i) % 250 for i in range(60)])
            builder.end_document()
        builder.finalize()
    (folder / "empty.jsonl").write_text("")
    lines = [json.dumps({"text": "fine"}), json.dumps({"text": "fine"})]
    (folder / "broken.jsonl").write_text("\n".join([*lines, '{"text": "torn']) + "\n")
    (folder / "keyless.jsonl").write_text("\n".join([*lines, '{"body": "x"}']) + "\n")
    shutil.copy(folder / "good.idx", folder / "short.idx")
    (folder / "short.bin").write_bytes((folder / "good.bin").read_bytes()[:-20])
    shutil.copy(folder / "good.bin", folder / "foreign.bin")
    (folder / "foreign.idx").write_bytes(b"not an index at all")
    (folder / "key.yaml").write_text("model: {num_layer: 2}\n")
    (folder / "section.yaml").write_text("modle: {num_layers: 2}\n")
    (folder / "value.yaml").write_text("model: {num_layers: two}\n")
    (folder / "cut-tokenizer").mkdir()
    (folder / "cut-tokenizer" / "tokenizer.json").write_text('{"version": "1.0", "trunc')
    (folder / "foreign-tokenizer").mkdir()
    (folder / "foreign-tokenizer" / "tokenizer.json").write_text("[1, 2, 3]")
    (folder / "no-checkpoint").mkdir()
    (folder / "huggingface").mkdir()
    (folder / "huggingface" / "config.json").write_text('{"architectures": ["BertModel"]}')
    (folder / "file").write_text("a file where a folder is wanted")
    with contextlib.chdir(folder):
        assert call(f"{TRAIN} {DATA} --save trained") == 0
    shutil.copytree(folder / "trained", folder / "torn")
    next((folder / "torn" / "iter_0000003").glob("*.safetensors")).write_bytes(b"torn")
    return folder


DATA = "--data-path good --tokenizer-model bytes"
TRAIN = f"megatron-train pretrain gpt {SIZES} {LENGTH}"
PREPROCESS = "megatron-data preprocess --tokenizer-model bytes --output-prefix out"

MISTAKES = {
    "missing corpus": (f"{PREPROCESS} --input nowhere.jsonl", ["nowhere.jsonl"]),
    "empty corpus": (f"{PREPROCESS} --input empty.jsonl", ["empty.jsonl"]),
    "a line that is not JSON": (f"{PREPROCESS} --input broken.jsonl", ["broken.jsonl", "3"]),
    "a line without the key": (
        f"{PREPROCESS} --input keyless.jsonl",
        ["keyless.jsonl", "3", "text"],
    ),
    "missing tokens": (f"{TRAIN} --tokenizer-model bytes --data-path nowhere", ["nowhere"]),
    "an index of another file": (f"{TRAIN} --tokenizer-model bytes --data-path short", ["short"]),
    "an index that is none": (
        f"{TRAIN} --tokenizer-model bytes --data-path foreign",
        ["foreign.idx"],
    ),
    "a split without training text": (f"{TRAIN} {DATA} --split 0,1,0", ["--split", "train"]),
    "a split without validation text": (
        f"{TRAIN} {DATA} --split 1,0,0 --eval-iters 1",
        ["--split", "validate"],
    ),
    "nothing to validate on": (
        f"{TRAIN} --train-data-path good --tokenizer-model bytes --eval-iters 1",
        ["--valid-data-path"],
    ),
    "missing tokenizer": (f"{TRAIN} --tokenizer-model nowhere --data-path good", ["nowhere"]),
    "a tokenizer too large for the model": (f"{TRAIN} {DATA} --vocab-size 8", ["--vocab-size 8"]),
    "tokens beyond the vocabulary": (
        f"{TRAIN} --data-path good --vocab-size 20",
        ["the vocabulary has 20", "tokenizer"],
    ),
    "heads that do not divide": (
        f"{TRAIN} {DATA} --num-attention-heads 3",
        ["--hidden-size 16", "heads 3"],
    ),
    "groups that do not divide": (
        f"{TRAIN} {DATA} --num-attention-heads 4 --num-query-groups 3",
        ["--num-attention-heads 4", "--num-query-groups 3"],
    ),
    "a batch that does not divide": (
        f"{TRAIN} {DATA} --global-batch-size 3",
        ["--global-batch-size 3", "--micro-batch-size 2"],
    ),
    "a sequence beyond the positions": (
        f"{TRAIN} {DATA} --max-position-embeddings 8",
        ["--seq-length 16", "--max-position-embeddings 8"],
    ),
    "several ranks": (
        f"{TRAIN} {DATA} --tensor-model-parallel-size 2",
        ["--tensor-model-parallel-size 2", "--nproc-per-node 2"],
    ),
    "a layout that does not divide": (
        "megatron-train layout --world-size 6 --tensor-model-parallel-size 4",
        ["6", "4"],
    ),
    "a misspelt flag": (f"{TRAIN} {DATA} --num-layer 2", ["--num-layer;", "--num-layers?"]),
    "a misspelt command": ("megatron-train pretrian gpt", ["'pretrian'", "pretrain?"]),
    "a flag without its value": (f"{TRAIN} {DATA} --seed", ["--seed"]),
    "a value of another type": (f"{TRAIN} {DATA} --lr fast", ["--lr", "'fast'"]),
    "a misspelt value": (f"{TRAIN} {DATA} --lr-decay-style cosin", ["'cosin'", "cosine?"]),
    "a misspelt key": (
        f"{TRAIN} {DATA} --config key.yaml",
        ["key.yaml", "model.num_layer;", "model.num_layers?"],
    ),
    "a misspelt section": (f"{TRAIN} {DATA} --config section.yaml", ["'modle'", "model?"]),
    "a key of another type": (
        f"{TRAIN} {DATA} --config value.yaml",
        ["value.yaml: model.num_layers", "'two'"],
    ),
    "what is required": (f"megatron-train pretrain gpt {DATA}", ["--num-layers", "--train-iters"]),
    "a warm-up as long as the run": (
        f"{TRAIN} {DATA} --lr-warmup-iters 3",
        ["warmup-iters 3", "train-iters 3"],
    ),
    "a checkpoint of another model": (
        f"{TRAIN} {DATA} --num-layers 3 --load trained",
        ["num_layers 2 there, 3 here"],
    ),
    "a torn checkpoint by name": (
        f"{TRAIN} {DATA} --load torn/iter_0000003",
        ["iter_0000003", "torn"],
    ),
    "nothing but torn checkpoints": (
        f"{TRAIN} {DATA} --load torn --exit-on-missing-checkpoint",
        ["--load torn"],
    ),
    "a model cut over too few ranks": (
        f"{TRAIN} {DATA} --nproc-per-node 3 --tensor-model-parallel-size 2",
        ["--tensor-model-parallel-size 2", "2 ranks", "there are 3"],
    ),
    "layers that do not divide over stages": (
        f"{TRAIN} {DATA} --nproc-per-node 4 --pipeline-model-parallel-size 4",
        ["2 layers", "4 stages"],
    ),
    "sequence parallelism without tensor parallelism": (
        f"{TRAIN} {DATA} --sequence-parallel",
        ["--sequence-parallel", "--tensor-model-parallel-size"],
    ),
    "a sequence that ranks cannot cut": (
        f"{TRAIN} {DATA} --nproc-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel "
        "--seq-length 15",
        ["--seq-length 15", "2 equal parts"],
    ),
    "a batch that ranks cannot share": (
        f"{TRAIN} {DATA} --nproc-per-node 2 --global-batch-size 6",
        ["--global-batch-size 6", "2 data parallel ranks"],
    ),
    "heads that ranks cannot share": (
        f"{TRAIN} {DATA} --nproc-per-node 3 --tensor-model-parallel-size 3",
        ["--num-attention-heads 2", "--tensor-model-parallel-size 3"],
    ),
    "no number of ranks": (f"{TRAIN} {DATA} --nproc-per-node two", ["--nproc-per-node", "'two'"]),
    "an axis that is not there yet": (
        f"{TRAIN} {DATA} --expert-model-parallel-size 2",
        ["--expert-model-parallel-size 2"],
    ),
    "a dropout that drops everything": (
        f"{TRAIN} {DATA} --hidden-dropout 1",
        ["--hidden-dropout", "1.0"],
    ),
    "two precisions": (f"{TRAIN} {DATA} --bf16 --float64", ["--bf16", "--float64"]),
    "two ways to name a corpus": (
        f"{TRAIN} {DATA} --train-data-path good",
        ["--data-path", "--train-data-path"],
    ),
    "a tokenizer file that was cut off": (
        f"{TRAIN} --data-path good --tokenizer-model cut-tokenizer",
        ["cut-tokenizer"],
    ),
    "a tokenizer file that is none": (
        f"{TRAIN} --data-path good --tokenizer-model foreign-tokenizer",
        ["foreign-tokenizer"],
    ),
    "a folder to save to that is a file": (f"{TRAIN} {DATA} --save file/run", ["file"]),
    "a folder that cannot be made": (f"{TRAIN} {DATA} --save /proc/run", ["/proc/run"]),
    "a report of nothing": ("megatron-train report no-checkpoint", ["metrics.jsonl", "--save"]),
    "no checkpoint to generate from": (
        "megatron-infer generate --load no-checkpoint --prompt x",
        ["no-checkpoint"],
    ),
    "a torn checkpoint to generate from": (
        "megatron-infer generate --load torn/iter_0000003 --prompt x",
        ["iter_0000003"],
    ),
    "a prompt longer than the model": (
        f"megatron-infer generate --load trained --prompt {'x' * 40}",
        ["16 positions"],
    ),
    "a server for everybody without a token": (
        "megatron-infer serve --load trained --host 0.0.0.0",
        ["0.0.0.0", "--token-file"],
    ),
    "a published model of another kind": (
        "megatron-ckpt convert --from-hf huggingface converted",
        ["BertModel"],
    ),
    "a checkpoint that is none": ("megatron-ckpt verify no-checkpoint", ["no-checkpoint"]),
    "a dataset that is none": ("megatron-data verify foreign", ["foreign.idx"]),
    "a folder that holds another run": (
        f"{TRAIN} {DATA} --save trained",
        ["--save trained", "--load trained"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_in_one_line(prepared, mistake, capsys, monkeypatch):
    command, parts = MISTAKES[mistake]
    monkeypatch.chdir(prepared)
    status = call(command)
    check(command, status, capsys.readouterr().err, parts)


@pytest.mark.parametrize(
    "command",
    [
        f"{TRAIN} {DATA} --save full",
        "megatron-data preprocess --tokenizer-model bytes --input fine.jsonl --output-prefix full",
    ],
)
def test_a_full_disk_is_answered_in_one_line_and_nothing_torn_is_left(
    prepared, command, capsys, monkeypatch
):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (prepared / "fine.jsonl").write_text('{"text": "fine"}\n')
    monkeypatch.chdir(prepared)
    monkeypatch.setattr(os, "fsync", full)
    status = call(command)
    check(command, status, capsys.readouterr().err, ["No space left on device"])
    assert not list(prepared.glob("full/iter_*")) and not list(prepared.glob("full*.bin"))


def test_a_port_in_use_is_answered_in_one_line(prepared, capsys, monkeypatch):
    monkeypatch.chdir(prepared)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = f"megatron-infer serve --load trained --port {port}"
        status = call(command)
    check(command, status, capsys.readouterr().err, [str(port), "in use"])


@pytest.mark.parametrize("mistake", ["a line that is not JSON", "a misspelt key", "missing tokens"])
def test_a_process_exits_with_that_status(prepared, mistake):
    command, parts = MISTAKES[mistake]
    name, *words = command.split()
    script = Path(sys.executable).with_name(name)
    done = subprocess.run([script, *words], cwd=prepared, capture_output=True, text=True)
    check(command, done.returncode, done.stderr, parts)


def check(command: str, status: int, stderr: str, parts: list[str]) -> None:
    errors = [line for line in stderr.splitlines() if "error:" in line]
    assert status in (1, 2), stderr
    assert "Traceback" not in stderr
    program = command.split(maxsplit=1)[0]
    assert len(errors) == 1 and errors[0].startswith(f"{program}: error: "), stderr
    for part in parts:
        assert part in errors[0]
