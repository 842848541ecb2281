"""Every mistake of a user ends in an error of one line and a non-zero exit status."""

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from megatron_data import ByteTokenizer, IndexedDatasetBuilder, preprocess
from megatron_data.tokenizers import NullTokenizer
from parsers import console_scripts

SIZES = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16"
LENGTH = "--micro-batch-size 2 --train-iters 3 --eval-iters 0 --no-progress"


def call(command: str) -> int:
    """Returns the exit status of a console script that runs in this process."""
    name, *words = command.split()
    return console_scripts()[name].load()(words)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Returns a folder with valid, damaged and missing files."""
    folder = tmp_path_factory.mktemp("errors")
    ByteTokenizer().save(folder / "bytes")
    with IndexedDatasetBuilder(str(folder / "good"), "uint16") as builder:
        for start in range(40):
            builder.add_item([(start + i) % 250 for i in range(60)])
            builder.end_document()
        builder.finalize()
    (folder / "numbers.jsonl").write_text('{"text": "1 2 3 4 5 6 7 8 9"}\n' * 40)
    for size in (256, 200):
        preprocess([folder / "numbers.jsonl"], folder / f"null{size}", NullTokenizer(size))
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
    (folder / "both.yaml").write_text("training: {bf16: true, float64: true}\n")
    (folder / "list.yaml").write_text("- model\n")
    (folder / "torn.yaml").write_text("model: {num_layers: 2\n")
    (folder / "vocab.json").write_text('{"a": 0, "b": 1}')
    shutil.copy(folder / "good.bin", folder / "cut.bin")
    (folder / "cut.idx").write_bytes((folder / "good.idx").read_bytes()[:100])
    (folder / "megatron" / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    (folder / "no-checkpoint").mkdir()
    (folder / "huggingface").mkdir()
    (folder / "huggingface" / "config.json").write_text('{"architectures": ["BloomForCausalLM"]}')
    (folder / "file").write_text("a file where a folder is wanted")
    with contextlib.chdir(folder):
        assert call(f"{TRAIN} {DATA} --save trained") == 0
        assert call(f"{TRAIN} {DATA} {LLAMA} --save llama") == 0
    shutil.copytree(folder / "trained", folder / "torn")
    next((folder / "torn" / "iter_0000003").glob("*.safetensors")).write_bytes(b"torn")
    return folder


DATA = "--data-path good --tokenizer-model bytes"
TRAIN = f"megatron-train pretrain gpt {SIZES} {LENGTH}"
MISMATCH = "--allow-tokenizer-mismatch"
LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
PREPROCESS = "megatron-data preprocess --tokenizer-model bytes --output-prefix out"

FOUND_IN_TRAINING = ("tokens beyond the vocabulary",)
MISTAKES = {
    "missing corpus": (f"{PREPROCESS} --input nowhere.jsonl", ["nowhere.jsonl"]),
    "empty corpus": (f"{PREPROCESS} --input empty.jsonl", ["empty.jsonl"]),
    "a line that is not JSON": (f"{PREPROCESS} --input broken.jsonl", ["broken.jsonl", "3"]),
    "a line without the key": (
        f"{PREPROCESS} --input keyless.jsonl",
        ["keyless.jsonl", "3", "text"],
    ),
    "missing tokens": (f"{TRAIN} --tokenizer-model bytes --data-path nowhere", ["nowhere"]),
    "a weight without its path": (
        f"{TRAIN} --tokenizer-model bytes --data-path 0.5",
        ["no dataset at 0.5", "if 0.5 is a weight, give WEIGHT PREFIX pairs"],
    ),
    "a weight too many": (
        f"{TRAIN} --tokenizer-model bytes --data-path 0.5 good 0.5",
        ["if 0.5 is a weight, give WEIGHT PREFIX pairs"],
    ),
    "a file to save into": (
        f"{TRAIN} {DATA} --save file",
        ["--save file: ", "file is a file, not a folder"],
    ),
    "a folder below a file": (
        f"{TRAIN} {DATA} --tensorboard-dir file/board",
        ["--tensorboard-dir file/board: ", "file is a file, not a folder"],
    ),
    "a sequence that exceeds the memory": (
        f"{TRAIN} {DATA} --seq-length 400000000",
        ["--seq-length 400000000", "needs at least", "GiB of activations", "this host has"],
    ),
    "not a number": (
        f"{TRAIN} {DATA} --lr nan",
        ["--lr needs a finite number, got 'nan'"],
    ),
    "an infinite number": (
        f"{TRAIN} {DATA} --distributed-timeout-minutes inf",
        ["--distributed-timeout-minutes needs a finite number"],
    ),
    "an index of another file": (f"{TRAIN} --tokenizer-model bytes --data-path short", ["short"]),
    "an invalid index": (
        f"{TRAIN} --tokenizer-model bytes --data-path foreign",
        ["foreign.idx"],
    ),
    "a split without training text": (f"{TRAIN} {DATA} --split 0,1,0", ["--split", "train"]),
    "a split without validation text": (
        f"{TRAIN} {DATA} --split 1,0,0 --eval-iters 1",
        ["--split", "validate"],
    ),
    "no validation data": (
        f"{TRAIN} --train-data-path good --tokenizer-model bytes --eval-iters 1",
        ["--valid-data-path"],
    ),
    "missing tokenizer": (f"{TRAIN} --tokenizer-model nowhere --data-path good", ["nowhere"]),
    "a tokenizer too large for the model": (f"{TRAIN} {DATA} --vocab-size 8", ["--vocab-size 8"]),
    "tokens beyond the vocabulary": (
        f"{TRAIN} --data-path good --vocab-size 20",
        ["the vocabulary has 20", "tokenizer"],
    ),
    "a corpus of another tokenizer": (
        f"{TRAIN} --data-path null256_text_document --tokenizer-model bytes",
        ["null256_text_document was made with tokenizer null:256, not with bytes:257", MISMATCH],
    ),
    "another tokenizer in one source of a blend": (
        f"{TRAIN} --data-path 0.5 null256_text_document 0.5 null200_text_document "
        "--tokenizer-type NullTokenizer --vocab-size 256",
        ["null200_text_document was made with tokenizer null:200, not with null:256", MISMATCH],
    ),
    "splits of two tokenizers": (
        f"{TRAIN} --train-data-path null256_text_document --valid-data-path null200_text_document "
        "--vocab-size 257",
        ["null:200", "null256_text_document with null:256", MISMATCH],
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
    "a batch ramp with an indivisible size": (
        f"{TRAIN.replace('--train-iters 3', '--train-samples 64')} {DATA} --global-batch-size 8 "
        "--rampup-batch-size 2 3 30",
        ["passes through 5", "--micro-batch-size 2"],
    ),
    "a batch ramp with a size that the schedule cannot run": (
        f"{TRAIN.replace('--train-iters 3', '--train-samples 640')} {DATA} --num-layers 4 "
        "--nproc-per-node 2 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 20 "
        "--rampup-batch-size 4 2 100",
        ["over 2 ranks cannot run 5 micro-batches"],
    ),
    "a batch ramp in a run with a number of steps": (
        f"{TRAIN} {DATA} --global-batch-size 8 --rampup-batch-size 2 2 30",
        ["--rampup-batch-size", "--train-samples"],
    ),
    "an invalid batch size schedule": (
        f"{TRAIN} {DATA} --step-batch-size-schedule 0:4 64:eight",
        ["--step-batch-size-schedule: '64:eight' is not TOKENS:SAMPLES"],
    ),
    "a batch size schedule with another last size": (
        f"{TRAIN} {DATA} --step-batch-size-schedule 0:4 64:8 --global-batch-size 4",
        ["--global-batch-size 4 is not 8, the last", "leave it out"],
    ),
    "a batch size schedule with rounding": (
        f"{TRAIN} {DATA} --step-batch-size-schedule 0:4 --decrease-batch-size-if-needed",
        ["--step-batch-size-schedule and --decrease-batch-size-if-needed exclude each other"],
    ),
    "a batch that is rounded down to zero": (
        f"{TRAIN} {DATA} --global-batch-size 1 --decrease-batch-size-if-needed",
        ["--global-batch-size 1 is less than 2 samples"],
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
    "missing required flags": (
        f"megatron-train pretrain gpt {DATA}",
        ["--num-layers", "--train-iters"],
    ),
    "a warm-up as long as the run": (
        f"{TRAIN} {DATA} --lr-warmup-iters 3",
        ["warmup-iters 3", "train-iters 3"],
    ),
    "a checkpoint of another model": (
        f"{TRAIN} {DATA} --num-layers 3 --load trained",
        ["num_layers 2 in the checkpoint and 3 in this run"],
    ),
    "the size of the checkpoint's vocabulary with a tokenizer that adds a token": (
        f"{TRAIN} --mock-data --tokenizer-type NullTokenizer --vocab-size 257 --load trained",
        ["257 in the checkpoint and 258 in this run", "(--vocab-size 256, since NullTokenizer"],
    ),
    "an incomplete checkpoint by name": (
        f"{TRAIN} {DATA} --load torn/iter_0000003",
        ["iter_0000003", "torn"],
    ),
    "only incomplete checkpoints": (
        f"{TRAIN} {DATA} --load torn --exit-on-missing-checkpoint",
        ["torn/iter_0000003", "damaged checkpoints"],
    ),
    "a model that does not fit the number of ranks": (
        f"{TRAIN} {DATA} --nproc-per-node 3 --tensor-model-parallel-size 2",
        ["--tensor-model-parallel-size 2", "2 ranks", "there are 3"],
    ),
    "layers that do not divide over stages": (
        f"{TRAIN} {DATA} --nproc-per-node 4 --pipeline-model-parallel-size 4",
        ["2 layers", "4 stages"],
    ),
    "a sequence that ranks cannot split": (
        f"{TRAIN} {DATA} --nproc-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel "
        "--seq-length 15",
        ["--seq-length 15", "2 equal slices"],
    ),
    "a batch that ranks cannot share": (
        f"{TRAIN} {DATA} --nproc-per-node 2 --global-batch-size 6",
        ["--global-batch-size 6", "2 data parallel ranks"],
    ),
    "heads that ranks cannot share": (
        f"{TRAIN} {DATA} --nproc-per-node 3 --tensor-model-parallel-size 3",
        ["--num-attention-heads 2", "--tensor-model-parallel-size 3"],
    ),
    "an invalid number of ranks": (
        f"{TRAIN} {DATA} --nproc-per-node two",
        ["--nproc-per-node", "'two'"],
    ),
    "an axis that the model does not support": (
        f"{TRAIN} {DATA} --expert-model-parallel-size 2",
        ["--expert-model-parallel-size 2"],
    ),
    "a dropout of one": (
        f"{TRAIN} {DATA} --hidden-dropout 1",
        ["--hidden-dropout", "1.0"],
    ),
    "two precisions": (f"{TRAIN} {DATA} --bf16 --float64", ["--bf16", "--float64"]),
    "two ways to name a corpus": (
        f"{TRAIN} {DATA} --train-data-path good",
        ["--data-path", "--train-data-path"],
    ),
    "a truncated tokenizer file": (
        f"{TRAIN} --data-path good --tokenizer-model cut-tokenizer",
        ["cut-tokenizer"],
    ),
    "an invalid tokenizer file": (
        f"{TRAIN} --data-path good --tokenizer-model foreign-tokenizer",
        ["foreign-tokenizer"],
    ),
    "a folder to save to that is a file": (f"{TRAIN} {DATA} --save file/run", ["file"]),
    "a folder that cannot be created": (f"{TRAIN} {DATA} --save /proc/run", ["/proc/run"]),
    "a report without metrics": (
        "megatron-train report no-checkpoint",
        ["metrics.jsonl", "--save"],
    ),
    "no checkpoint to generate from": (
        "megatron-infer generate --load no-checkpoint --prompt x",
        ["no-checkpoint"],
    ),
    "an incomplete checkpoint to generate from": (
        "megatron-infer generate --load torn/iter_0000003 --prompt x",
        ["iter_0000003"],
    ),
    "a prompt longer than the model": (
        f"megatron-infer generate --load trained --prompt {'x' * 40}",
        ["16 positions"],
    ),
    "a public server without a token": (
        "megatron-infer serve --load trained --host 0.0.0.0",
        ["0.0.0.0", "--token-file"],
    ),
    "a published model of another kind": (
        "megatron-ckpt convert --from-hf huggingface converted",
        ["BloomForCausalLM"],
    ),
    "not a checkpoint": ("megatron-ckpt verify no-checkpoint", ["no-checkpoint"]),
    "not a dataset": ("megatron-data verify foreign", ["foreign.idx"]),
    "two keys that exclude each other": (
        f"{TRAIN} {DATA} --config both.yaml",
        ["bf16", "float64"],
    ),
    "a file without settings": (f"{TRAIN} {DATA} --config list.yaml", ["list.yaml", "list"]),
    "a file that is not YAML": (f"{TRAIN} {DATA} --config torn.yaml", ["torn.yaml is not YAML"]),
    "a missing file of settings": (
        f"{TRAIN} {DATA} --config nowhere.yaml",
        ["nowhere.yaml: No such file"],
    ),
    "a misspelt recipe": (f"{TRAIN} {DATA} --recipe lama-tiny", ["'lama-tiny'", "llama-tiny?"]),
    "a truncated index": (
        f"{TRAIN} --tokenizer-model bytes --data-path cut",
        ["cut.idx has 100 bytes", "truncated"],
    ),
    "half of a tokenizer": (
        f"{TRAIN} --data-path good --vocab-file vocab.json",
        ["--vocab-file", "--merge-file"],
    ),
    "a missing tokenizer file": (
        "megatron-data preprocess --input empty.jsonl --output-prefix out "
        "--vocab-file nowhere.json --merge-file nowhere.txt",
        ["nowhere.json"],
    ),
    "a checkpoint of another family": (
        f"{TRAIN} {DATA} --load llama",
        [
            "llama/iter_0000003 holds another model",
            "normalization RMSNorm in the checkpoint and LayerNorm in this run",
        ],
    ),
    "a checkpoint of Megatron-LM": (f"{TRAIN} {DATA} --load megatron", ["megatron", "Megatron-LM"]),
    "a published model instead of a checkpoint": (
        f"{TRAIN} {DATA} --load huggingface",
        ["huggingface is a Hugging Face folder", "--from-hf"],
    ),
    "a file instead of a checkpoint": (f"{TRAIN} {DATA} --load good.bin", ["good.bin is a file"]),
    "an incomplete checkpoint to verify": ("megatron-ckpt verify torn", ["torn"]),
    "an unknown family": (
        "megatron-ckpt convert --to-hf trained exported --family gtp2",
        ["'gtp2'", "gpt2"],
    ),
    "a folder to export to that is not empty": (
        "megatron-ckpt convert --to-hf trained huggingface",
        ["huggingface exists"],
    ),
    "a missing device": ("megatron-kernels list --device cuda:99", ["cuda:99"]),
    "a misspelt precision": ("megatron-kernels list --dtype float23", ["'float23'", "float32?"]),
    "a missing file of prompts": (
        "megatron-infer generate --load trained --prompt-file nowhere.txt",
        ["nowhere.txt: No such file"],
    ),
    "a folder that holds another run": (
        f"{TRAIN} {DATA} --save trained",
        ["--save trained", "--load trained"],
    ),
}


@pytest.mark.usefixtures("plain_runs")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gives_one_line(prepared, mistake, capsys, monkeypatch):
    command, parts = MISTAKES[mistake]
    monkeypatch.chdir(prepared)
    status = call(command)
    shown = capsys.readouterr()
    check(command, status, shown.err, parts)
    if mistake not in FOUND_IN_TRAINING:  # the error comes before the lines on the environment
        assert "environment: " not in shown.out


@pytest.mark.parametrize("mistake", ["a line that is not JSON", "a misspelt key", "missing tokens"])
def test_a_process_exits_with_that_status(prepared, mistake, preloaded):
    command, parts = MISTAKES[mistake]
    name, *words = command.split()
    script = Path(sys.executable).with_name(name)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = {"cwd": prepared, "capture_output": True, "text": True, "env": environment}
    done = preloaded.run([script, *words], **options)
    check(command, done.returncode, done.stderr, parts)


def check(command: str, status: int, stderr: str, parts: list[str]) -> None:
    errors = [line for line in stderr.splitlines() if "error:" in line]
    assert status in (1, 2), stderr
    assert "Traceback" not in stderr
    program = command.split(maxsplit=1)[0]
    assert len(errors) == 1 and errors[0].startswith(f"{program}: error: "), stderr
    for part in parts:
        assert part in errors[0]
