"""`megatron-train` and `megatron-infer` on one GPU, run in this process."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from megatron_infer.cli import main as infer
from megatron_train import read_records
from megatron_train.cli import main as train

pytestmark = pytest.mark.gpu

SIZES = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
BATCH = "--micro-batch-size 2 --global-batch-size 4 --eval-iters 0 --lr 1e-3"
DATA = "--train-data-path train_text_document --tokenizer-model tokenizer"
RUN = f"pretrain gpt {SIZES} {BATCH} {DATA} --no-progress --device cuda"


@pytest.fixture
def pretrain(
    device: torch.device,
    corpus: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    plain_runs: None,
) -> Iterator[Callable[..., list[float]]]:
    """Returns a function that trains and returns the losses of all steps."""
    monkeypatch.chdir(corpus)

    def run(folder: str, words: str) -> list[float]:
        status = train(f"{RUN} --save {folder} {words}".split())
        assert status == 0, capsys.readouterr().err
        return [step["lm loss"] for step in read_records(Path(folder) / "metrics.jsonl").train]

    yield run


def test_a_continued_run_has_the_losses_of_an_uninterrupted_one(pretrain):
    whole = pretrain("whole", "--train-iters 6 --bf16")
    pretrain("halves", "--train-iters 6 --bf16 --exit-interval 3")
    assert pretrain("halves", "--train-iters 6 --bf16 --load halves") == whole
    assert len(whole) == 6


def test_a_deterministic_run_with_experts_is_repeatable(pretrain):
    words = "--train-iters 3 --deterministic-mode --num-experts 4 --moe-router-topk 2"
    assert pretrain("one", words) == pretrain("two", words)


def test_a_model_trained_on_a_gpu_generates_on_gpu_and_cpu(pretrain, capsys):
    pretrain("model", "--train-iters 3 --hidden-dropout 0 --attention-dropout 0")
    capsys.readouterr()
    texts = []
    for where in ("cuda", "cpu"):
        words = f"generate --load model --device {where} --temperature 0 --max-new-tokens 8"
        assert infer([*words.split(), "--prompt", "the whale"]) == 0
        texts.append(re.sub(r"\s+", " ", capsys.readouterr().out))
    assert texts[0] == texts[1]


@pytest.mark.gpu(real="torch.compile makes kernels for it")
def test_a_compiled_run_has_the_losses_of_a_plain_one(pretrain):
    words = "--train-iters 4 --hidden-dropout 0 --attention-dropout 0"
    assert pretrain("compiled", f"{words} --compile") == pytest.approx(
        pretrain("plain", words), 1e-4
    )
