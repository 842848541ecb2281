"""The backends of a run on this machine: their reasons, their errors, and what the log names."""

import sys

import fake_transformer_engine
import pytest
import torch
from megatron_train.errors import TrainError
from megatron_train.kernels import describe_products, explain_run_backends
from megatron_train.run_description import describe_run

from .test_configuration import MINIMAL, parse

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="flash-attn may run here")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--use-flash-attn",
            "--attention-backend: attention cannot use backend flash_attn: needs a CUDA tensor, q "
            "is on cpu; leave it out",
        ),
        (
            "--transformer-impl transformer_engine",
            "--transformer-impl: linear cannot use backend transformer_engine: needs a CUDA "
            "tensor, x is on cpu; leave it out",
        ),
        (
            "--kernel-backends attention=flash_attn",
            "--kernel-backends: attention cannot use backend flash_attn: needs a CUDA tensor, q is "
            "on cpu; leave it out",
        ),
    ],
)
def test_a_backend_that_cannot_run_here_is_refused_with_its_reason(
    flags: str, message: str
) -> None:
    with pytest.raises(TrainError) as error:
        explain_run_backends(parse(f"{MINIMAL} {flags}"), CPU, torch.float32)
    assert str(error.value) == message


def test_a_recipe_that_the_device_lacks_is_refused_by_its_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_transformer_engine.install(monkeypatch, on_cpu=True)
    few = "--fp8-format hybrid --fp8-recipe mxfp8"
    assert "backend reference" in describe_products(parse(f"{MINIMAL} {few}"), CPU, torch.float32)
    run = parse(f"{MINIMAL} {few} --transformer-impl transformer_engine")
    assert "mxfp8 (hybrid) by Transformer Engine" in describe_products(run, CPU, torch.float32)
    lacking = (False, "Device compute capability 10.0 or higher required.")
    module = sys.modules["transformer_engine.pytorch"]
    monkeypatch.setattr(module, "is_mxfp8_available", lambda return_reason: lacking)
    with pytest.raises(TrainError) as error:
        describe_products(run, CPU, torch.float32)
    assert str(error.value) == (
        "--fp8-recipe: fp8 mxfp8 (hybrid) by Transformer Engine: mxfp8 is not supported: Device "
        "compute capability 10.0 or higher required; choose another recipe or device"
    )


def test_the_log_names_backends_and_reasons_if_one_is_requested() -> None:
    for flags, expected in (
        ("", []),
        (
            "--kernel-backends layer_norm=reference",
            [
                "kernels of plain calls: linear torch (first choice); layer_norm reference "
                "(requested); attention torch (flash_attn: needs a CUDA tensor, q is on cpu; "
                "flash_attn_3: needs a CUDA tensor, q is on cpu); gelu torch (first choice)"
            ],
        ),
    ):
        run = parse(f"{MINIMAL} {flags}")
        kernels = explain_run_backends(run, CPU, torch.float32)
        lines = list(describe_run(run, None, {}, torch.float32, kernels))
        assert [line for line in lines if line.startswith("kernels")] == expected
