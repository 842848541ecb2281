"""Flags that choose backends, and their errors."""

import argparse
from pathlib import Path

import pytest
import torch
from megatron_train.config.flags import Parser, add_run_options
from megatron_train.config.kernel_backends import chosen_backends, fusions_without_effect
from megatron_train.config.resolve import resolve
from megatron_train.config.run import RunConfig
from megatron_train.config.run_sections import run_options, sections
from megatron_train.errors import TrainError

RUN = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --vocab-size 100 --seq-length 16 "
    "--micro-batch-size 2 --train-iters 10 --data-path corpus"
)
CPU = torch.device("cpu")


def parse(flags: str = "", config: Path | None = None) -> RunConfig:
    parser = Parser()
    add_run_options(parser, run_options(), {name: title for name, (title, _) in sections().items()})
    namespace: argparse.Namespace = parser.parse_args(f"{RUN} {flags}".split())
    namespace.config, namespace.recipe, namespace.kind = config, None, "gpt"
    return resolve(namespace, 1)[0]


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        ("", {}),
        ("--attention-backend auto", {}),
        ("--attention-backend flash", {"attention": "flash_attn"}),
        ("--use-flash-attn", {"attention": "flash_attn"}),
        ("--use-flash-attn --flash-attention-version 2", {"attention": "flash_attn"}),
        ("--use-flash-attn --flash-attention-version 3", {"attention": "flash_attn_3"}),
        ("--attention-backend fused", {"attention": "torch,triton,tiles"}),
        ("--attention-backend unfused", {"attention": "reference"}),
        ("--attention-backend local", {"attention": "reference"}),
        ("--transformer-impl local", {}),
        (
            "--transformer-impl transformer_engine",
            {
                "linear": "transformer_engine",
                "layer_norm": "transformer_engine",
                "add_layer_norm": "separate",
            },
        ),
        (
            "--transformer-impl transformer_engine --kernel-backends linear=torch gelu=reference",
            {
                "linear": "torch",
                "layer_norm": "transformer_engine",
                "add_layer_norm": "separate",
                "gelu": "reference",
            },
        ),
        ("--no-bias-gelu-fusion", {"bias_gelu": "separate", "gelu": "torch"}),
        ("--disable-bias-linear --no-bias-gelu-fusion", {"gelu": "torch"}),
        (
            "--swiglu --no-bias-gelu-fusion --no-bias-swiglu-fusion",
            {"bias_swiglu": "separate", "swiglu": "torch"},
        ),
        ("--no-bias-dropout-fusion", {"bias_dropout_add": "separate"}),
        ("--no-rope-fusion", {}),  # there is none without --position-embedding-type rope
        (
            "--position-embedding-type rope --no-rope-fusion",
            {"rope_qkv": "separate", "rope": "torch"},
        ),
        ("--no-cross-entropy-loss-fusion", {"vocab_cross_entropy": "separate"}),
        ("--cross-entropy-loss-fusion", {}),
        ("--batch-invariant-mode --no-bias-gelu-fusion", {"bias_gelu": "separate"}),
    ],
)
def test_megatrons_switches_choose_backends(flags: str, chosen: dict[str, str]) -> None:
    assert chosen_backends(parse(flags)) == chosen


def test_a_fusion_that_no_layer_has_is_switched_off_with_a_note() -> None:
    run = parse("--no-rope-fusion --no-bias-gelu-fusion")
    assert fusions_without_effect(run) == ["rope_fusion"]


def test_a_file_chooses_backends(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("placement:\n  kernel_backends: [attention=torch, gelu=reference]\n")
    assert chosen_backends(parse(config=file)) == {"attention": "torch", "gelu": "reference"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--kernel-backends attention", "'attention' is not OP=BACKEND; use for example attention"),
        ("--kernel-backends =torch", "'=torch' is not OP=BACKEND"),
        ("--kernel-backends gelu=torch gelu=auto", "names gelu twice; give it once"),
        ("--kernel-backends glu=reference", "no layer of this model calls glu; choose backends of"),
        ("--kernel-backends gelo=torch", "there is no operation 'gelo'; did you mean gelu?"),
        ("--kernel-backends gelu=troch", "gelu has no backend 'troch'; did you mean 'torch'?"),
        (
            "--kernel-backends attention=torch --attention-backend local",
            "attention=torch and --attention-backend local choose the same backend",
        ),
        (
            "--kernel-backends attention_forward=torch",
            "attention_forward has no effect with --context-parallel-size 1; leave it out",
        ),
        (
            "--transformer-impl transformer_engine --compile",
            "--compile does not work with linear layers by Transformer Engine, which compiled code",
        ),
        (
            "--kernel-backends bias_gelu=reference --no-bias-gelu-fusion",
            "bias_gelu=reference and --no-bias-gelu-fusion choose the same backend; leave out one",
        ),
        ("--flash-attention-version 3", "has no effect without --attention-backend flash"),
    ],
)
def test_choices_that_mean_nothing_are_refused(flags: str, message: str) -> None:
    with pytest.raises(TrainError) as error:
        parse(flags)
    assert message in str(error.value)
