"""`megatron-train pretrain gpt` as a user runs it, from text to a trained model."""

import json
import math
import re
import signal
import subprocess
from pathlib import Path

import pytest
from megatron_ckpt import find_checkpoint
from megatron_data import load_tokenizer
from megatron_models import GPTConfig
from megatron_train import read_records

SIZES = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
LENGTH = "--micro-batch-size 4 --global-batch-size 8 --train-iters 12"
DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
RATE = "--lr 1e-2 --min-lr 1e-3 --lr-warmup-iters 2 --lr-decay-style cosine --lr-decay-iters 12"
WATCH = "--log-interval 4 --eval-interval 6 --eval-iters 2"


DATA = "--train-data-path train_text_document --valid-data-path valid_text_document"
ALWAYS = (
    f"pretrain gpt {DATA} --tokenizer-model tokenizer {SIZES} {LENGTH} {DROPOUT} {RATE} {WATCH}"
)


@pytest.fixture(scope="module")
def pretrain(corpus, run_command):
    """Returns a function that runs `pretrain gpt` with more flags in a separate process."""

    def start(more: str) -> subprocess.CompletedProcess[str]:
        return run_command(corpus, f"megatron-train {ALWAYS} {more}", whole=True)

    return start


@pytest.fixture
def train(train_in, corpus):
    """Returns a function that runs `pretrain gpt` in this process and returns its output."""
    return train_in(corpus)


@pytest.fixture(scope="module")
def whole(corpus, pretrain):
    """Returns the output and the records of an uninterrupted run."""
    done = pretrain("--save whole --tensorboard-dir whole/tensorboard")
    return done, read_records(corpus / "whole" / "metrics.jsonl")


def losses(folder: Path) -> dict[int, float]:
    return {r["iteration"]: r["lm loss"] for r in read_records(folder / "metrics.jsonl").train}


def test_the_loss_goes_down(whole):
    _, records = whole
    train = [record["lm loss"] for record in records.train]
    assert [record["iteration"] for record in records.train] == list(range(1, 13))
    assert train[-1] < train[0] - 1
    valid = [record["lm loss"] for record in records.validation]
    assert [record["iteration"] for record in records.validation] == [6, 12]
    assert valid[1] < valid[0] < math.log(300) + 0.5


def test_lines_have_megatrons_format(whole):
    done, records = whole
    lines = [line for line in done.stdout.splitlines() if " iteration " in line and "[20" in line]
    assert len(lines) == 3
    shape = (
        r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration        4/      12 \|"
        r" consumed samples:           32 \| elapsed time per iteration \(ms\): [\d.]+ \|"
        r" learning rate: [\d.]+E[+-]\d\d \| global batch size:     8 \|"
        r" lm loss: [\d.]+E\+00 \| loss scale: 1\.0 \| grad norm: [\d.]+ \|"
        r" number of skipped iterations:   0 \| number of nan iterations:   0 \|"
        r" tokens/s: [\d.]+ \|"
    )
    assert re.fullmatch(shape, lines[0]), lines[0]
    sums = [(r["lm loss"], r["tokens"]) for r in records.train[:4]]
    mean = sum(loss * tokens for loss, tokens in sums) / sum(tokens for _, tokens in sums)
    assert f"lm loss: {mean:.6E}" in lines[0]
    assert "validation loss at iteration 6 | lm loss value:" in done.stdout
    assert "MFU" not in done.stdout  # MFU needs a peak, which a CPU does not have
    assert "environment: python" in done.stdout and "model: " in done.stdout


def test_a_run_writes_all_files_to_inspect_and_continue_it(corpus, whole):
    folder = corpus / "whole"
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    checkpoint = find_checkpoint(folder)
    assert checkpoint.iteration == 12
    assert GPTConfig.from_dict(checkpoint.model.config).num_layers == 2
    assert (checkpoint.model.kind, checkpoint.model.family) == ("gpt", None)
    tokenizer = load_tokenizer(checkpoint.path / "tokenizer")
    assert tokenizer.fingerprint == load_tokenizer(corpus / "tokenizer").fingerprint


def test_a_stopped_run_resumes_bit_for_bit(corpus, pretrain, whole):
    first = pretrain("--save stopped --exit-interval 5")
    assert (
        "stopped after step 5 of 12: --exit-interval 5; saved in stopped/iter_0000005; "
        "the same command with --load stopped continues it" in first.stdout
    )
    second = pretrain("--save stopped --load stopped")
    assert "continuing from stopped after step 5" in second.stdout
    assert losses(corpus / "stopped") == losses(corpus / "whole")
    _, records = whole
    again = read_records(corpus / "stopped" / "metrics.jsonl")
    assert [r["grad_norm"] for r in again.train] == [r["grad_norm"] for r in records.train]
    assert [r["lm loss"] for r in again.validation] == [r["lm loss"] for r in records.validation]
    line = re.compile(r"iteration +8/.*?(lm loss: \S+)")
    assert line.search(second.stdout)[1] == line.search(whole[0].stdout)[1]


def test_a_batch_ramp_continues_at_an_intermediate_size(corpus, train):
    words = (
        f"pretrain gpt {DATA} --tokenizer-model tokenizer {SIZES} {DROPOUT} --lr 1e-2 "
        "--micro-batch-size 4 --rampup-batch-size 4 4 20 --global-batch-size 12 "
        "--train-samples 50 --eval-iters 0 --no-progress --log-interval 1"
    )
    printed = train(f"{words} --save grown")
    assert "4 to 12 samples a step in 1 to 3 micro-batches of 4" in printed
    sizes = [4, 4, 4, 8, 12, 12]  # 6 samples remain, fewer than a step
    assert re.findall(r"global batch size: +(\d+)", printed) == [str(size) for size in sizes]
    assert "iteration        6/       6 | consumed samples:           44 |" in printed
    train(f"{words} --save halved --exit-interval 4")
    train(f"{words} --save halved --load halved")
    assert losses(corpus / "halved") == losses(corpus / "grown")


def test_a_batch_size_schedule_continues_where_the_size_changes(corpus, train):
    length = int(re.search(r"--seq-length (\d+)", f"{DATA} {SIZES}")[1])
    words = (
        f"pretrain gpt {DATA} --tokenizer-model tokenizer {SIZES} {DROPOUT} --lr 1e-2 "
        f"--micro-batch-size 4 --step-batch-size-schedule 0:4 {6 * length}:12,{20 * length}:8 "
        "--eval-iters 0 --no-progress --log-interval 1"
    )
    printed = train(f"{words} --train-samples 45 --save stepped")
    assert "4 to 12 samples a step in 1 to 3 micro-batches of 4" in printed
    sizes = [4, 4, 12, 8, 8, 8]  # 8 samples are not below 6, and 20 not below 20; 1 sample remains
    assert re.findall(r"global batch size: +(\d+)", printed) == [str(size) for size in sizes]
    assert "iteration        6/       6 | consumed samples:           44 |" in printed
    train(f"{words} --train-samples 45 --save parted --exit-interval 3")
    # Remaining samples are counted from the consumed ones; earlier sizes have no influence.
    changed = words.replace("0:4 ", "0:12 ")
    printed = train(f"{changed} --train-samples 45 --save parted --load parted")
    assert "iteration        6/       6 | consumed samples:           44 |" in printed
    assert losses(corpus / "parted") == losses(corpus / "stepped")
    printed = train(f"{words} --train-iters 6")
    assert "iteration        6/       6 | consumed samples:           44 |" in printed


def test_a_rounded_batch_continues_on_ranks_without_rounding(corpus, train):
    words = (
        f"pretrain gpt {DATA} --tokenizer-model tokenizer {SIZES} {DROPOUT} --lr 1e-2 "
        "--global-batch-size 10 --decrease-batch-size-if-needed --train-samples 40 "
        "--eval-iters 1 --no-progress --log-interval 1"
    )
    printed = train(f"{words} --micro-batch-size 4 --save rounded --exit-interval 3")
    assert re.findall(r"global batch size: +(\d+)", printed) == ["8", "8", "8"]
    assert "iteration        3/       5 |" in printed
    printed = train(f"{words} --micro-batch-size 2 --load rounded --save rounded")
    assert "iteration        4/       4 | consumed samples:           34 |" in printed


def test_the_configuration_of_a_run_can_be_run_again(corpus, train, whole):
    train("pretrain gpt --config whole/config.yaml --save again --no-progress")
    assert losses(corpus / "again") == losses(corpus / "whole")


def test_a_signal_ends_a_run_after_its_step(corpus, command):
    words = f"{ALWAYS} --train-iters 100000 --log-interval 1 --eval-iters 0 --save signalled"
    with subprocess.Popen(
        command(f"megatron-train {words}"), cwd=corpus, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if "iteration        3/" in line:
                break
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    stopped = int(re.search(r"stopped after step (\d+) of 100000: SIGTERM", rest)[1])
    assert find_checkpoint(corpus / "signalled").iteration == stopped >= 3


def test_a_killed_run_resumes_from_its_newest_complete_checkpoint(corpus, train, whole):
    flags = f"{ALWAYS} --save killed --save-interval 2"
    train(f"{flags} --exit-interval 6")
    torn = corpus / "killed" / "iter_0000006"
    next(torn.glob("*.safetensors")).write_bytes(b"")
    printed = train(f"{flags} --load killed")
    assert "continuing from killed after step 4" in printed
    assert printed.count("warning: ") == 1 and "iter_0000006 is torn" in printed
    assert losses(corpus / "killed") == losses(corpus / "whole")


def test_another_order_of_samples_gives_a_warning_or_an_error(corpus, train, whole):
    """Checks Megatron-LM's order, which depends on the run's length, and ours, which does not."""
    printed = train(f"{ALWAYS} --load whole --train-iters 13")
    assert "the order of samples differs" not in printed
    other = f"{ALWAYS} --load whole --train-iters 13 --train-data-path valid_text_document"
    printed = train(other, status=1)
    assert (
        "data ['train_text_document'] in the checkpoint and ['valid_text_document'] in this run"
        in printed
    )
    assert "--data-path-changes to replace data from a sample on, or --allow-changed" in printed
    printed = train(f"{other} --allow-changed-run data")
    assert printed.count("warning: ") == 1
    assert "the order of samples differs from that before step 12" in printed
    assert "use --data-path-changes to replace data from a sample on" in printed
    compat = f"{ALWAYS} --sample-order compat --save compat"
    train(f"{compat} --exit-interval 1")
    printed = train(f"{compat} --load compat --train-iters 13 --exit-interval 2")
    assert printed.count("warning: ") == 1
    assert "samples 96 in the checkpoint and 104 in this run" in printed
    assert "nothing left to do" in train(f"{ALWAYS} --load whole")


def test_a_later_change_of_data_keeps_earlier_samples(corpus, train, whole):
    mixed = ["2", "train_text_document", "1", "valid_text_document"]
    (corpus / "changes.json").write_text(json.dumps([{"from_sample": 40, "data_path": mixed}]))
    changed = f"{ALWAYS} --data-path-changes changes.json --save changed"
    train(f"{changed} --exit-interval 4")  # 32 samples
    printed = train(f"{ALWAYS} --load changed --save unchanged --exit-interval 5")
    assert "warning: " not in printed
    train(f"{changed} --load changed")
    assert "changes [[40, " in train(f"{ALWAYS} --load changed --train-iters 13", status=1)
    printed = train(f"{ALWAYS} --load changed --train-iters 13 --allow-changed-run data")
    assert "the order of samples differs from that before step 12" in printed
    same = losses(corpus / "whole")
    assert {step: loss for step, loss in losses(corpus / "changed").items() if step <= 5} == {
        step: loss for step, loss in same.items() if step <= 5
    }


def test_without_a_checkpoint_a_run_starts_fresh_or_refuses(train):
    printed = train(f"{ALWAYS} --load nowhere --exit-interval 1")
    assert "no complete checkpoint in nowhere: starting a new run" in printed
    printed = train(f"{ALWAYS} --load nowhere --exit-on-missing-checkpoint", status=1)
    assert "--load nowhere has no complete checkpoint" in printed


def test_bf16_trains_and_resumes_bit_for_bit(corpus, train, whole):
    train(f"{ALWAYS} --bf16 --save bf16")
    train(f"{ALWAYS} --bf16 --save bf16-stopped --exit-interval 5")
    train(f"{ALWAYS} --bf16 --save bf16-stopped --load bf16-stopped")
    bf16 = losses(corpus / "bf16")
    assert losses(corpus / "bf16-stopped") == bf16
    fp32 = losses(corpus / "whole")
    assert bf16 != fp32
    assert all(bf16[step] == pytest.approx(fp32[step], abs=0.05) for step in fp32)


def test_a_run_with_mup_resumes_bit_for_bit_and_only_with_the_same_base(corpus, train, whole):
    words = f"{ALWAYS} --use-mup --mup-base-hidden-size"
    train(f"{words} 4 --save mup")
    train(f"{words} 4 --save mup-stopped --exit-interval 5")
    printed = train(f"{words} 8 --save mup-stopped --load mup-stopped", status=1)
    assert "mup_base_hidden_size" in printed or "--mup-base-hidden-size" in printed
    train(f"{words} 4 --save mup-stopped --load mup-stopped")
    assert losses(corpus / "mup-stopped") == losses(corpus / "mup") != losses(corpus / "whole")


def test_accumulation_equals_one_big_batch_in_float64(corpus, train):
    train(f"{ALWAYS} --float64 --eod-mask-loss --micro-batch-size 2 --save parts")
    train(f"{ALWAYS} --float64 --eod-mask-loss --micro-batch-size 8 --save big")
    parts, big = losses(corpus / "parts"), losses(corpus / "big")
    assert parts == pytest.approx(big, rel=1e-12)


def test_documents_can_be_masked_from_one_another(corpus, train, whole):
    flags = "--reset-position-ids --reset-attention-mask"
    train(f"{ALWAYS} {flags} --save apart")
    apart, across = losses(corpus / "apart"), losses(corpus / "whole")
    assert apart != across and apart[12] < apart[1] - 1


@pytest.mark.slow
def test_a_compiled_run_has_the_same_losses(corpus, train, whole):
    train(f"{ALWAYS} --compile --save compiled")
    expected = losses(corpus / "whole")
    assert losses(corpus / "compiled") == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_a_compiled_run_with_experts_has_the_same_losses(corpus, train):
    experts = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
    train(f"{ALWAYS} {experts} --save experts")
    train(f"{ALWAYS} {experts} --compile --save compiled-experts")
    expected = losses(corpus / "experts")
    assert losses(corpus / "compiled-experts") == pytest.approx(expected, rel=1e-4)
