"""Fine-tuning on conversations in JSON lines equals that on tokenized ones, and continues."""

import json
import random

import pytest
from megatron_data import IndexedDataset, tokenize_conversations
from megatron_data.datasets import conversation_lines
from megatron_data.tokenizers.chat import ChatTemplate
from megatron_data.tokenizers.loading import load_tokenizer
from megatron_train import read_records

TRAIN = (
    "pretrain gpt --sft --tokenizer-model tokenizer "
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 96 "
    "--train-iters 6 --lr-decay-iters 6 "
    "--micro-batch-size 2 --eval-iters 1 --hidden-dropout 0 --attention-dropout 0 --lr 1e-3 "
    "--split 8,1,1 --no-progress --device cpu"
)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def talks(corpus):
    """Returns a folder with a tokenizer with a template, conversations and their tokens."""
    (corpus / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    words, rows = random.Random(0), []
    for _ in range(40):
        said = [" ".join(words.choices(["the whale", "a ship", "sees"], k=6)) for _ in range(2)]
        turns = zip(("user", "assistant"), said, strict=True)
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    (corpus / "talks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = load_tokenizer(corpus / "tokenizer")
    tokenize_conversations(
        [corpus / "talks.jsonl"], corpus / "talks", tokenizer, ChatTemplate(TEMPLATE)
    )
    return corpus


@pytest.fixture
def train(train_in, talks):
    """Returns a function that runs `megatron-train` and returns its output."""
    run = train_in(talks)
    return lambda words, status=0: run(f"{TRAIN} {words}", status)


def losses(talks, save):
    return [record["lm loss"] for record in read_records(talks / save / "metrics.jsonl").train]


def test_a_run_reads_its_corpus_and_checks_its_index_once(train, monkeypatch):
    calls = []
    check, find = IndexedDataset.check, conversation_lines._find_lines
    monkeypatch.setattr(IndexedDataset, "check", lambda self: calls.append("check") or check(self))
    monkeypatch.setattr(
        conversation_lines, "_find_lines", lambda path: calls.append("find") or find(path)
    )
    train("--data-path talks.jsonl --train-iters 1")
    assert calls == ["find"]
    calls.clear()
    train("--data-path talks_conversation --sample-order compat --train-iters 1")
    assert calls == ["check", "check"], "the tokens and their mask"


def test_limits_of_lines_are_settings_of_a_run(train):
    message = "talks.jsonl:1: a document of "
    assert message in train("--data-path talks.jsonl --max-document-bytes 90", status=1)
    for flag in ("steps", "characters"):
        limit = f"--max-template-{flag}"
        assert limit in train(f"--data-path talks.jsonl {limit} 5", status=1)
        printed = train(f"--data-path talks_conversation {limit} 5", status=1)
        assert f"{limit} limits what --sft reads from JSON lines" in printed


def test_losses_equal_those_of_tokenized_conversations_and_a_run_continues(talks, train):
    printed = train("--data-path talks.jsonl --save lines")
    assert "data.sample_order: compat  [--sft with JSON lines]" in printed
    train("--data-path talks_conversation --sample-order compat --save tokens")
    assert losses(talks, "lines") == losses(talks, "tokens")
    train("--data-path talks.jsonl --save parts --exit-interval 2")
    assert "continuing from parts after step 2" in train(
        "--data-path talks.jsonl --save parts --load parts"
    )
    assert losses(talks, "parts") == losses(talks, "lines")
    once = "--data-path talks.jsonl --load lines --train-iters 7 --split 8,1,1"
    identity = "--sft-tokenizer-prompt-format identity"
    changed = (
        "in the checkpoint and {'sft_tokenizer_prompt_format': 'identity', 'template': 'sha256:"
    )
    refused = train(f"{once} {identity}", status=1)
    assert changed in refused and "--allow-changed-run data" in refused
    assert changed in train(f"{once} {identity} --allow-changed-run data")
    template = talks / "tokenizer" / "chat_template.jinja"
    before = template.read_text()
    assert "written" not in train(once)
    template.write_text(before.replace("{{", "{{ '' ~", 1))
    assert "written {'template': 'sha256:" in train(once, status=1)
    template.write_text(before)


def test_conversations_stay_whole_by_default(talks, train):
    once = "--train-iters 1 --eval-iters 0 --data-path talks_conversation"
    assert "data.sample_order: packed  [--sft]" in train(once)
    assert "data.sample_order: stateless  [--sample-order]" in train(
        f"{once} --sample-order stateless"
    )
    assert "warning" not in train(once)
    assert "conversations longer than a sample, split" in train(f"{once} --seq-length 12")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--data-path talks.jsonl --sample-order packed",
            "run megatron-data tokenize-conversations",
        ),
        ("--data-path wrong.jsonl", "wrong.jsonl:3: no conversation"),
        ("--data-path nowhere.jsonl", "nowhere.jsonl does not exist"),
        ("--data-path talks.jsonl --tokenizer-type ByteTokenizer", "--tokenizer-model does not go"),
        (
            "--data-path talks.jsonl --tokenizer-prompt-format llama3 --image-tag-type x",
            "nvlm, int",
        ),
    ],
)
def test_unusable_data_gives_one_line(talks, train, words, message):
    lines = (talks / "talks.jsonl").read_text().split("\n")
    (talks / "wrong.jsonl").write_text("\n".join([*lines[:2], '{"text": "?"}', *lines[3:]]))
    printed = train(words, status=2 if "image" in words else 1)
    errors = [line for line in printed.splitlines() if "error:" in line]
    assert len(errors) == 1 and message in errors[0], printed
