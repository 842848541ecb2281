"""`--fp16` finds its scale, learns like fp32 and continues; formats of state in checkpoints."""

import dataclasses
import json
import re
import subprocess

import pytest
import torch
from megatron_ckpt import find_checkpoint
from megatron_models import GPTConfig, Placement, gpt_chunks
from megatron_parallel import Mesh
from megatron_train import read_records
from megatron_train.engine import StepEngine
from megatron_train.tasks.gpt import GPTTask
from megatron_train.tasks.task import MicroBatch

RUN = (
    "pretrain gpt --train-data-path train_text_document --tokenizer-model tokenizer --eval-iters 0 "
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --hidden-dropout 0 "
    "--attention-dropout 0 --micro-batch-size 4 --global-batch-size 8 --lr 1e-3 --log-interval 1 "
    "--lr-decay-style constant"
)


@pytest.fixture
def train(train_in, corpus):
    """Returns a function that runs `pretrain gpt` in this process and returns its output."""
    return train_in(corpus)


def steps(corpus, name):
    return read_records(corpus / name / "metrics.jsonl").train


def test_a_run_in_fp16_halves_its_scale_until_gradients_fit_and_learns_like_fp32(corpus, train):
    printed = train(f"{RUN} --train-iters 40 --fp16 --save half --no-progress")
    found = steps(corpus, "half")
    scales = [float(text) for text in re.findall(r"loss scale: ([\d.]+)", printed)]
    assert scales[:3] == [2.0**32, 2.0**32, 2.0**31] and len(scales) == 40
    skipped = [not record["updated"] for record in found]
    first = skipped.index(False)
    assert 5 < first < 30 and not any(skipped[first + 2 :])
    assert printed.count("number of skipped iterations:   1") == sum(skipped)
    assert "number of nan iterations:   1" not in printed
    train(f"{RUN} --train-iters {40 - first} --save full --no-progress")
    # Samples of skipped steps are lost, so the runs see different batches.
    half, full = (
        [record["lm loss"] for record in steps(corpus, name)[-5:]] for name in ("half", "full")
    )
    assert sum(half) == pytest.approx(sum(full), rel=0.02)


def test_a_run_in_fp16_continues_with_its_scale(corpus, train):
    train(f"{RUN} --train-iters 24 --fp16 --save whole16 --no-progress")
    flags = f"{RUN} --train-iters 24 --fp16 --save cut16 --load cut16 --no-progress"
    train(f"{flags} --exit-interval 20")
    saved = find_checkpoint(corpus / "cut16").values()["optimizer"]
    assert saved["loss_scale"] < 2.0**32 and saved["loss_scale_hysteresis"] == 0
    train(flags)
    names = ("iteration", "lm loss", "grad_norm", "updated", "loss_scale")
    whole, cut = (
        [[record.get(name) for name in names] for record in steps(corpus, folder)]
        for folder in ("whole16", "cut16")
    )
    assert whole == cut


def test_fp16_on_ranks_skips_the_same_steps(corpus, run_command):
    rank = f"megatron-train {RUN} --train-iters 24 --fp16 --device cpu"
    run_command(corpus, f"{rank} --save one16")
    run_command(corpus, f"{rank} --save two16 --nproc-per-node 2 --use-distributed-optimizer")
    one, two = steps(corpus, "one16"), steps(corpus, "two16")
    names = ("updated", "loss_scale")
    assert [[r[n] for n in names] for r in one] == [[r[n] for n in names] for r in two]
    for here, there in zip(one, two, strict=True):
        assert here["lm loss"] == pytest.approx(there["lm loss"], rel=2e-3)


def test_a_loss_scale_without_fp16_is_refused(train):
    printed = train(f"{RUN} --train-iters 1 --bf16 --hysteresis 3", 1)
    assert "--hysteresis has no effect without --fp16" in printed
    printed = train(f"{RUN} --train-iters 1 --fp16 --min-loss-scale 1e10", 1)
    assert "--min-loss-scale 10000000000.0 exceeds --initial-loss-scale 4294967296.0" in printed


def test_offloading_that_does_not_work_is_refused(train):
    flags = f"{RUN} --train-iters 1 --optimizer-cpu-offload"
    printed = train(flags, 1)
    assert "error: --optimizer-cpu-offload has no effect: the device is a CPU" in printed
    printed = train(f"{flags} --ema-decay 0.9", 1)
    assert "error: --ema-decay does not work with --optimizer-cpu-offload" in printed


def test_a_checkpoint_without_main_weights_is_refused_where_they_are_needed(train):
    flags = f"{RUN} --bf16 --train-iters 2 --save pure16 --no-progress"
    pure = "--use-precision-aware-optimizer --main-params-dtype bf16"
    train(f"{flags} {pure} --exit-interval 1")
    printed = train(f"{flags} --load pure16", 1)
    assert "has no main weights, because it was saved with fp32 weights or with" in printed
    printed = train(f"{flags} {pure} --load pure16")
    assert "continuing from pure16 after step 1" in printed


@pytest.mark.parametrize(
    "flags",
    [
        "--fp16",
        pytest.param(
            "--bf16 --use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "--bf16 --use-precision-aware-optimizer --main-params-dtype bf16",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_step_on_a_gpu_waits_for_nothing(command, tmp_path, flags):
    sizes = RUN.partition("--eval-iters")[2].replace("--log-interval 1", "--vocab-size 300")
    line = f"megatron-train dry-run gpt --mock-data --eval-iters {sizes} --train-iters 2 {flags}"
    # A device is imagined before torch is imported, so a forked process cannot.
    printed = subprocess.check_output(command(line), cwd=tmp_path, text=True)
    assert "since no CUDA device could be imagined" not in printed
    assert re.search(r"waits for the device +0\n", printed)
    assert re.search(r"blocking copies +0\n", printed)


@pytest.mark.slow
def test_offloaded_state_leaves_the_device_and_costs_one_wait(command, run_command, tmp_path):
    sizes = (
        "gpt --mock-data --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 32 "
        "--vocab-size 512 --global-batch-size 2 --micro-batch-size 1 --bf16 --json "
        "--hidden-dropout 0 --attention-dropout 0 "
        "--optimizer-cpu-offload --optimizer-offload-fraction 0.5"
    )
    line = command(f"megatron-train dry-run {sizes} --eval-iters 0 --train-iters 2")
    found = json.loads(subprocess.check_output(line, cwd=tmp_path, text=True))
    planned = json.loads(run_command(tmp_path, f"megatron-train plan {sizes} --count").stdout)
    rank, said = found["of_ranks"][0], planned["memory"]["optimizer"]
    assert found["device"] == "cuda"
    assert said == 6 * planned["parameters"]  # half of 12 bytes
    # Whole tensors are offloaded, and sizes are rounded up to 512 bytes.
    assert said <= rank["memory"]["optimizer state"] <= 1.05 * said
    waits = {line: count for line, count in rank["waits"].items() if count}
    assert list(waits.values()) == [1] and "decision.py" in next(iter(waits))


def test_losses_inside_the_model_are_scaled_like_the_main_loss():
    config = GPTConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        vocab_size=64,
        max_position_embeddings=16,
        num_experts=4,
        moe_aux_loss_coeff=0.1,
        moe_z_loss_coeff=0.1,
        mtp_num_layers=1,
    )

    def gradients(scale, **coefficients):
        changed = dataclasses.replace(config, **coefficients)
        mesh = Mesh.single()
        stages = gpt_chunks(changed, Placement(mesh, dtype=torch.float64), seed=3)
        engine = StepEngine(GPTTask(stages, None), mesh)
        tokens = torch.arange(32).view(2, 16)
        fields = {"tokens": tokens, "labels": tokens + 1, "loss_mask": torch.ones(2, 16)}
        batches = [MicroBatch.from_fields(fields, token_field="tokens")]
        sums = engine.run(batches, engine.denominators(batches), 1, scale)
        return dict(engine.stages.gradients()), sums

    one, plain = gradients(None)
    many, same = gradients(torch.tensor(2.0**40))
    assert plain.keys() == same.keys() and len(plain) == 4
    for name, gradient in one.items():
        assert torch.equal(many[name], 2.0**40 * gradient), name
    # Each of these losses contributes to the gradient.
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff", "mtp_loss_scaling_factor"):
        without, _ = gradients(None, **{name: 0.0})
        assert any(not torch.equal(without[n], gradient) for n, gradient in one.items())
