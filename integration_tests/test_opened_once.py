"""Before its first step, a run opens each input once and computes each index once."""

import json
from collections import Counter
from pathlib import Path

import pytest
from megatron_data import ByteTokenizer, IndexedDataset, IndexedDatasetBuilder, train_bpe
from megatron_data.order import compat
from megatron_train import tokenizer
from megatron_train.cli import main
from megatron_train.tasks import gpt_data

RUN = """pretrain gpt --num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 16
    --micro-batch-size 2 --train-iters 2 --tokenizer-model bytes --eval-iters 1 --lr 1e-3
    --device cpu --no-progress --save out"""


@pytest.fixture
def counted(tmp_path, monkeypatch, plain_runs):
    """Returns a function that trains in a folder with corpora and counts calls by name."""
    monkeypatch.chdir(tmp_path)
    ByteTokenizer().save("bytes")
    train_bpe(["you see the image there"], 300).save("chat")
    for name in ("text", "more"):
        with IndexedDatasetBuilder(name, "uint16") as builder:
            for start in range(60):
                builder.add_item([*((start + i) % 250 for i in range(9)), 256])
                builder.end_document()
            builder.finalize()
    turns = [{"role": role, "content": "ah"} for role in ("user", "assistant")]
    Path("talks.jsonl").write_text(60 * (json.dumps({"messages": turns}) + "\n"))
    changes = [{"from_sample": 2, "data_path": ["more"]}]
    Path("changes.json").write_text(json.dumps(changes))
    calls: Counter[str] = Counter()

    def count(owner, name, label=""):
        before = getattr(owner, name)

        def called(*args, **given):
            calls[label or name] += 1
            return before(*args, **given)

        monkeypatch.setattr(owner, name, called)

    count(tokenizer, "build_tokenizer")
    count(gpt_data, "read_data_path_changes")
    count(gpt_data, "conversation_tokenizer")
    count(IndexedDataset, "__init__", "corpora")
    count(compat, "build_shuffle_index")

    def run(words):
        assert main(f"{RUN} {words}".split()) == 0
        return dict(calls)

    return run


def test_tokenizer_corpora_and_their_changes(counted):
    calls = counted("--data-path text --split 6,3,1 --data-path-changes changes.json")
    assert calls == {"build_tokenizer": 1, "read_data_path_changes": 1, "corpora": 2}


def test_the_order_of_each_split(counted):
    calls = counted("--data-path text --split 6,3,1 --sample-order compat")
    assert calls == {"build_tokenizer": 1, "corpora": 1, "build_shuffle_index": 3}


def test_the_template_of_conversations(counted):
    talks = "--sft --reset-position-ids --reset-attention-mask --data-path talks.jsonl"
    prompt = "--tokenizer-model chat --tokenizer-type SFTTokenizer --seq-length 96"
    calls = counted(f"{talks} --split 6,3,1 {prompt}")
    assert calls == {"build_tokenizer": 1, "conversation_tokenizer": 1}
