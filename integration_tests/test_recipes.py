"""Every recipe trains with its settings at a small size."""

import math

import pytest
import torch
from megatron_train import read_records
from megatron_train.cli import main
from megatron_train.config.recipes import recipe_kind, recipe_names

SMALL = (
    "--num-layers 2 --hidden-size 48 --num-attention-heads 3 --num-query-groups 3 --kv-channels 16"
    " --ffn-hidden-size 64 --seq-length 32 --micro-batch-size 2 --global-batch-size 4"
    " --eval-iters 1 --eval-interval 3 --no-progress"
    " --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --no-sequence-parallel"
)
DATA = "--data-path train_text_document --tokenizer-model tokenizer --split 8,2,0"


def schedule(name: str) -> str:
    """Returns flags of a schedule over six steps, in samples if the recipe has a batch ramp."""
    rates = "--lr 1e-2 --min-lr 0"
    if name == "gpt3-175b":
        samples = "--train-samples 20 --lr-decay-samples 20 --lr-warmup-samples 2"
        return f"{rates} {samples} --rampup-batch-size 2 2 4"
    last = " --lr-wsd-decay-iters 2" if name == "smollm2-135m" else ""
    return f"{rates} --train-iters 6 --lr-decay-iters 6 --lr-warmup-iters 1{last}"


DECODERS = [name for name in recipe_names() if recipe_kind(name) == "gpt"]
"""The recipes for text without sentences; test_pretrain_bert.py has those of BERT, and
test_recurrent_runs.py those of recurrent models."""


@pytest.mark.usefixtures("plain_runs")
@pytest.mark.parametrize("name", DECODERS)
def test_a_recipe_trains(corpus, name, capsys, monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.chdir(corpus)
    words = f"pretrain gpt --recipe {name} {SMALL} {DATA} {schedule(name)} --save {name}"
    if name == "deepseek-tiny":  # its heads have widths of their own, and its layers a pattern
        words = words.replace("--num-query-groups 3 --kv-channels 16", "--moe-layer-freq [0]+[1]")
    status = main(words.split())
    torch.set_num_threads(threads)
    assert status == 0, capsys.readouterr().err
    assert f"[recipe {name}: " in capsys.readouterr().out
    losses = [r["lm loss"] for r in read_records(corpus / name / "metrics.jsonl").train]
    assert len(losses) == 6 and all(map(math.isfinite, losses)) and losses[-1] < losses[0]
