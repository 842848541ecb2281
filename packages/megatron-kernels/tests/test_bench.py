"""The benchmark of backends: what it calls, its arithmetic, its table and its picture."""

import re
import sys
from pathlib import Path

import pytest
import torch
from megatron_kernels import Backend, op, operations
from megatron_kernels.bench import Measurement, bench, measure, workloads_of
from megatron_kernels.cli import SIZES, main
from megatron_kernels.inputs import InputGenerator
from megatron_kernels.registry import NEVER_RUN, accept_all
from megatron_kernels.roofline import write_roofline
from megatron_kernels.workload import SHAPES, Workload, least_bytes
from megatron_kernels.workloads import WORKLOADS
from torch import Tensor

CPU = torch.device("cpu")
NOT_MEASURED = {
    "attention_forward",
    "attention_backward",
    "index_scores",
    "glu",
    "pointwise",
    "add_vocab_gradient",
}
calls: list[str] = []


def recorded(name: str, x: Tensor) -> Tensor:
    calls.append(f"{name} {'both' if torch.is_grad_enabled() else 'forward'}")
    return 2 * x


def broken() -> Tensor:
    raise RuntimeError("no kernel image\nis available")


@op(
    Backend("absent", lambda x: x, lambda _: "there is no such device", ""),
    Backend("broken", lambda x: broken(), accept_all, ""),
    Backend("untried", lambda x: recorded("untried", x), accept_all, "", on_request=NEVER_RUN),
    Backend("plain", lambda x: recorded("plain", x), accept_all, ""),
)
def twice(x: Tensor, *, backend: str = "auto") -> Tensor:
    """Doubles a tensor."""
    return twice.run(backend, x)


TWICE = Workload(twice, "", lambda draw, _: (draw.normal(8, 4),), lambda _: 1000.0)


def test_all_backends_of_a_call_run_interleaved() -> None:
    calls.clear()
    rates, found = measure(TWICE, CPU, torch.float32, "small", rounds=3)
    shapes = ["untried both", "plain both"]  # each runs once before, for its outputs
    one_round = ["untried forward", "untried both", "plain forward", "plain both"]
    assert calls == shapes + 4 * one_round
    absent, failing, untried, plain = found
    assert failing.reason == "RuntimeError: no kernel image"
    assert (absent.reason, absent.forward) == ("there is no such device", 0.0)
    assert untried.label == NEVER_RUN and plain.label is None
    assert rates.bytes > 0 and rates.flops > 0


def test_the_bound_is_the_longer_time_of_products_and_bytes() -> None:
    rates, (*_, plain) = measure(TWICE, CPU, torch.float32, "small", rounds=1)
    moved = 2 * (2 * 8 * 4 * 4) + 8 * 4 * 4  # x and y twice, and the gradient of x
    assert (plain.moved, plain.products) == (moved, 3000.0)
    assert plain.bound == max(3000.0 / rates.flops, moved / rates.bytes)
    assert plain.by_products == (3000.0 / rates.flops > moved / rates.bytes)
    known = Measurement("", "", None, None, 1e-3, 4e-3, 2e9, 1e6, 1e-3, by_products=True)
    assert (known.share, known.rate) == (0.25, 5e11)


def test_bytes_of_a_call_without_gradients_are_those_of_inputs_and_outputs() -> None:
    x, y = torch.zeros(3, 5), torch.zeros(2, dtype=torch.float64)
    assert least_bytes((x, None, 3), (y,)) == (76, 152)


def test_every_operation_is_measured_or_named_here() -> None:
    assert {each.op.name for each in WORKLOADS} | NOT_MEASURED == {*operations()}
    assert tuple(SHAPES) == SIZES


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each.title)
def test_calls_are_arguments_of_their_operation(workload: Workload) -> None:
    """Runs the preferred backend on small shapes."""
    arguments = workload.arguments(InputGenerator(torch.float32, CPU), SHAPES["small"])
    found = workload.op.run("auto", *workload.op.given(*arguments))
    outputs = found if isinstance(found, tuple) else (found,)
    assert all(output.float().isfinite().all() for output in outputs)


def test_the_command_prints_a_table_and_draws_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "roofline.png"
    words = ["bench", "rms_norm", "linear", "--size", "small", "--rounds", "1"]
    assert main([*words, "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^rms_norm  \[copy [\d.]+ GB/s, product [\d.]+ GFLOP/s\]$", out, re.M)
    assert re.search(r"^  torch +[\d.]+ +[\d.]+ +[\d.e+-]+ GB/s +\d+%$", out, re.M)
    assert "  apex               cannot: needs a CUDA tensor, x is on cpu" in out
    assert "layer_norm" not in out and f"wrote {picture}" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    words = ["bench", "permute", "--size", "small", "--rounds", "1", "--picture"]
    assert main([*words, str(tmp_path / "x.png")]) == 1
    error = capsys.readouterr().err
    assert "pip install megatron-kernels[bench]" in error and error.count("\n") == 1


def test_errors_of_the_command_name_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["bench", "rms_nrm"], "no operation 'rms_nrm'; did you mean rms_norm?"),
        (["bench", "glu"], "glu is not measured; leave it out"),
        (["bench", "--rounds", "0"], "--rounds 0 is not positive; use for example 7"),
    ):
        assert main(words) == 1
        assert message in capsys.readouterr().err


def test_chosen_backends_alone_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "gelu", "linear", "--size", "small", "--rounds", "1", "--backends"]
    assert main([*words, "reference"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("  reference ") == 2
    assert "  torch " not in printed
    assert main([*words, "nothing"]) == 1
    assert "no measured operation has a backend nothing" in capsys.readouterr().err


def test_reports_are_drawn_without_products(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert len(workloads_of(["permute"])) == 1
    reports = list(bench(CPU, torch.float32, "small", ["permute"], rounds=1))
    write_roofline(reports, tmp_path / "some.svg", "a title")
    assert "a title" in (tmp_path / "some.svg").read_text()
