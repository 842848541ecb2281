"""The command `megatron-kernels`."""

import re
import subprocess
import sys

import pytest
import torch
from megatron_kernels import check, cli
from megatron_kernels.cli import main


def test_list_names_every_operation_backend_and_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    for name in ("layer_norm", "rms_norm", "gelu", "swiglu", "softmax", "rope", "cross_entropy"):
        assert f"{name}: torch (request: auto)" in out
    assert " > torch" in out and "flash_attn      cannot: needs a CUDA tensor, q is on cpu" in out
    assert "on request only, never run on a GPU by this project" in out
    for library in ("triton", "flash-attn", "transformer-engine", "apex"):
        assert f"   {library}" in out
    assert "by Transformer Engine  [on request only, never run on a GPU by this project]" in out
    assert "   mxfp8           cannot: needs a CUDA tensor, x is on cpu" in out


def test_check_passes_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--dtype", "float64", "--inputs", "small", "empty", "nan"]) == 0
    out = capsys.readouterr().out
    assert "float64 on cpu, tolerance 1e-12" in out and "FAILED" not in out
    assert "attention, flash_attn: needs a CUDA tensor" in out
    count, total = out.splitlines()[-1].split(" checks")[0].split(" of ")
    assert count == total and int(total) >= 19


def test_check_fails_when_a_tolerance_is_exceeded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(check.TOLERANCES, torch.float32, 1e-12)
    assert main(["check", "rms_norm", "gelu", "--dtype", "float32", "--inputs", "small"]) == 1
    out = capsys.readouterr().out
    assert "FAILED with small" in out and "layer_norm" not in out


def test_the_inputs_of_the_command_are_those_of_the_check() -> None:
    assert cli.INPUTS == check.INPUTS


def test_known_deviations_and_misspelt_operations_are_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Deviates on every CPU; `attention` does not if the CPU has no AVX-512.
    assert main(["check", "paged_attention", "--dtype", "float32", "--inputs", "nan"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"known deviations\n  paged_attention .*, torch, nan: torch's kernel ret", out)
    assert main(["check", "atention"]) == 1
    assert "no operation 'atention'; did you mean attention?" in capsys.readouterr().err


def test_a_missing_device_is_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--device", "cuda:99"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("megatron-kernels: error: --device cuda:99: ")
    assert error.endswith("use --device cpu\n") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "hint"),
    [(["lst"], "did you mean list?"), (["list", "--dtpe", "float32"], "did you mean --dtype?")],
)
def test_misspelt_words_exit_2_and_name_the_nearest(
    argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert hint in capsys.readouterr().err


def test_help_does_not_import_torch() -> None:
    script = "import sys\nfrom megatron_kernels.cli import main\ntry: main(['--help'])\n" \
        "except SystemExit: pass\nassert 'torch' not in sys.modules"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
