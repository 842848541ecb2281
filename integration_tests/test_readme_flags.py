"""Command lines of Megatron-LM's README with another launcher, and the table of flags."""

import json
import random
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from megatron_data import train_bpe
from megatron_train.config.run_sections import run_options
from megatron_train.megatron_lm.table import megatron_flags

# The pretraining example of the README: a GPT of 345 million parameters, with flags in order.
MODEL = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 8 --lr 0.00015 "
    "--train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 "
    "--weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0"
)
DATA = (
    "--data-path my-gpt2_text_document --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt "
    "--split 949,50,1"
)
OUTPUT = (
    "--log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 "
    "--save checkpoints/gpt2_345m --load checkpoints/gpt2_345m"
)
README = f"pretrain gpt {MODEL} {DATA} {OUTPUT}"

# The example of 175 billion parameters with a batch size ramp.
LARGE = (
    "pretrain gpt --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
    "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 1536 "
    "--rampup-batch-size 16 16 5859375 "
    "--train-samples 146484375 --lr-decay-samples 126953125 --lr-warmup-samples 183105 "
    "--lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --weight-decay 0.1 --adam-beta1 0.9 "
    "--adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --bf16 --sequence-parallel "
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --log-interval 10 "
    f"--eval-iters 40 --eval-interval 1000 --tensorboard-dir board {DATA} --split 98,2,0"
)

# The README's preprocessing of a corpus for GPT.
PREPROCESS = (
    "--input my-corpus.json --output-prefix my-gpt2 --vocab-file gpt2-vocab.json "
    "--tokenizer-type GPT2BPETokenizer --merge-file gpt2-merges.txt --append-eod"
)

# Flags that make the first example small; later flags override earlier ones.
SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --train-iters 4 "
    "--lr-decay-iters 400 --eval-iters 1 --log-interval 2 --no-progress"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with GPT-2's two tokenizer files and the preprocessed `my-corpus.json`."""
    folder = tmp_path_factory.mktemp("readme")
    words, phrases = random.Random(1), ("the whale", "a ship", "sails on", "sees", "the white sea")
    texts = [" ".join(words.choice(phrases) for _ in range(50)) for _ in range(300)]
    tokenizer = train_bpe(texts, 290)
    tokenizer.save(folder / "tokenizer")
    model = json.loads((folder / "tokenizer" / "tokenizer.json").read_text())["model"]
    (folder / "gpt2-vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "gpt2-merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    (folder / "my-corpus.json").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return folder


@pytest.fixture
def call(train_in, folder):
    """Returns a function that runs megatron-train in the folder and returns its output."""
    return train_in(folder)


def shown(printed: str) -> dict[str, str]:
    lines = (line.split("#")[0] for line in printed.splitlines())
    return dict(re.findall(r"^  (\w+): (.*?) *$", "\n".join(lines), re.MULTILINE))


def test_the_pretraining_line_has_megatrons_meaning(call, folder):
    found = shown(call(f"{README} --print-config"))
    tokens = len(json.loads((folder / "gpt2-vocab.json").read_text()))
    expected = {"num_layers": "24", "vocab_size": str(tokens), "max_position_embeddings": "1024"}
    expected |= {"lr": "0.00015", "min_lr": "1.0e-05", "lr_warmup_fraction": "0.01"}
    expected |= {"split": "'949,50,1'", "global_batch_size": "8", "save_interval": "10000"}
    assert expected.items() <= found.items()


def test_the_line_of_175_billion_parameters_has_megatrons_meaning(call, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1024")
    found = shown(call(f"{LARGE} --print-config"))
    expected = {"train_samples": "146484375", "lr_warmup_samples": "183105", "tp": "8", "pp": "16"}
    assert expected.items() <= found.items() and "train_iters" not in found


def test_unsupported_flags_give_one_line_each(call):
    flags = (
        "--fp8-param-gather --checkpoint-activations --data-impl mmap --distributed-backend nccl"
    )
    lines = call(f"{README} {flags}", status=2).splitlines()
    assert len(lines) == 4 and "3 arguments cannot be used" in lines[-1]
    assert "--fp8-param-gather is not supported yet; planned: training in FP8" in lines[0]
    assert "give --recompute-granularity full" in lines[1]
    assert "--data-impl is a flag of Megatron-LM and is refused here" in lines[2]


def test_the_readmes_lines_train_and_continue(call, folder, run_command):
    run_command(folder, f"megatron-data preprocess {PREPROCESS}")
    assert (folder / "my-gpt2_text_document.bin").exists()
    assert (folder / "my-gpt2_text_document.idx").exists()
    words = f"{README} {SMALL}"
    printed = call(f"{words} --exit-interval 2")
    assert "no complete checkpoint in checkpoints/gpt2_345m: starting a new run" in printed
    assert "stopped after step 2 of 4" in printed
    printed = call(words)
    assert "continuing from checkpoints/gpt2_345m after step 2" in printed
    assert "iteration        4/       4" in printed


@cache
def accepted_by(command: str) -> set[str]:
    """Returns the flags in a command's ``--help``, or ``--help-all`` if it shows that flag."""
    name, *words = command.split()
    program = [str(Path(sys.executable).with_name(name)), *words]
    for request in ("--help", "--help-all"):
        done = subprocess.run([*program, request], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        shown = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", done.stdout))
        if "--help-all" not in shown:
            break
    return shown


FLAGS = megatron_flags()
COMMANDS = sorted({command for flag in FLAGS.values() for command in flag.commands})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_accepts_the_flags_of_the_table(command):
    said = {flag.flag for flag in FLAGS.values() if command in flag.commands}
    help_shows = accepted_by(command) | opposites(command)
    assert said <= help_shows


def opposites(command: str) -> set[str]:
    """Returns the negative forms of switches, which --help does not show."""
    if command != "megatron-train pretrain gpt":
        return set()
    return {option.opposite for option in run_options()} - {None}


def test_no_command_accepts_planned_or_refused_flags():
    for command in COMMANDS:
        for name in accepted_by(command) & FLAGS.keys():
            assert FLAGS[name].status in ("works", "alias"), f"{command} takes {FLAGS[name]}"
