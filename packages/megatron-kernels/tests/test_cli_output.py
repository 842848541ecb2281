"""What the command prints: the table of the check, its verdicts, and the line of progress."""

import io
import sys
import time
from typing import Any

import pytest
import torch
from megatron_kernels import check as check_module
from megatron_kernels._progress import progress
from megatron_kernels.bench import ROUNDS
from megatron_kernels.check import Result
from megatron_kernels.cli import build_parser, main
from megatron_kernels.registry import NEVER_RUN
from megatron_kernels.transformer_engine import check as recipes
from megatron_kernels.transformer_engine.check import RecipeResult


def result(backend: str, error: float, gradient: float, **options: Any) -> Result:
    dtype, reason = torch.float32, options.pop("reason", None)
    case = options.pop("case", "a case")
    return Result("gelu", case, backend, dtype, reason, error, gradient, **options)


def checked(
    results: list[Result], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[str]]:
    """Returns the exit status and the lines of a check with given results."""
    monkeypatch.setattr(check_module, "check", lambda *_: iter(results))
    status = main(["check", "gelu", "--dtype", "float32", "--inputs", "small", "nan"])
    return status, capsys.readouterr().out.splitlines()


def test_each_backend_of_a_call_has_its_largest_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, (title, columns, *rows) = checked(
        [
            result("torch", 1e-6, 3e-6),
            result("torch", 2e-6, 1e-6, inputs="nan"),
            result("other", 0.0, 0.0, case=""),
            result("absent", 0.0, 0.0, reason="needs a moon"),
        ],
        monkeypatch,
        capsys,
    )
    assert status == 0
    assert title == "float32 on cpu, tolerance 1e-05, inputs small, nan"
    assert columns.split() == ["operation", "backend", "error", "gradient"]
    assert rows[0].split() == ["gelu", "(a", "case)", "torch", "2.0e-06", "3.0e-06"]
    assert rows[1].split() == ["gelu", "other", "0.0e+00", "0.0e+00"]
    for row in rows[:2]:  # aligned with the names of the columns
        assert row.index(row.split()[-3]) == columns.index("backend")
        assert len(row) == len(columns) and row[: columns.index("error") + 5].endswith(("6", "0"))
        assert row[: columns.index("error") + 5].split()[-1] == row.split()[-2]
    assert rows[2:] == ["not checked", "  gelu, absent: needs a moon", "3 of 3 checks passed"]


def test_failures_are_named_with_their_inputs_and_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, (_, _, *rows) = checked(
        [
            result("torch", 1e-6, 0.0),
            result("torch", 0.5, 0.25, inputs="nan"),
            result("torch", 0.25, 0.75, inputs="inf"),
            result("broken", torch.inf, torch.inf, failure="OSError: no such file"),
        ],
        monkeypatch,
        capsys,
    )
    assert status == 1
    assert rows[0].endswith("torch               5.0e-01   7.5e-01  FAILED with nan, inf")
    assert rows[1].endswith("inf       inf  FAILED with small: OSError: no such file")
    assert rows[2:] == ["1 of 4 checks passed"]


def test_recipes_have_a_row_with_their_largest_error_of_a_gradient(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [
        RecipeResult("few", None, (1e-3, 2e-3, 5e-3, 4e-4)),
        RecipeResult("fewer", None, (0.5, 0.25, 0.125, 0.0), passed=False),
        RecipeResult("none", "needs a moon"),
    ]
    monkeypatch.setattr(recipes, "check_recipes", lambda _: iter(found))
    monkeypatch.setattr(check_module, "check", lambda *_: iter(()))
    for ops in ([], ["linear"], ["gelu"]):
        status = main(["check", *ops, "--dtype", "float32", "--inputs", "small"])
        _, columns, *rows = capsys.readouterr().out.splitlines()
        if ops == ["gelu"]:  # another operation has no recipes
            assert status == 0 and rows == ["0 of 0 checks passed"]
            continue
        assert status == 1
        right = ["products", "in", "few", "bits", "(few)", "transformer_engine"]
        assert rows[0].split() == [*right, "1.0e-03", "5.0e-03"]
        assert rows[1].endswith("5.0e-01   2.5e-01  FAILED")
        assert len(rows[0]) == len(columns) and rows[0].index("transf") == columns.index("backend")
        assert rows[2:] == [
            "not checked",
            "  products in few bits (none), transformer_engine: needs a moon",
            "1 of 2 checks passed",
        ]


def test_known_deviations_pass_and_are_listed_if_they_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, (_, _, *rows) = checked(
        [
            result("torch", torch.inf, 0.0, known="as ever", inputs="nan"),
            result("other", 0.0, 0.0, known="no longer", inputs="nan"),
        ],
        monkeypatch,
        capsys,
    )
    assert status == 0
    assert [row.split()[3] for row in rows[:1]] == ["other"]  # nothing is right or wrong in torch
    assert rows[1:] == [
        "known deviations",
        "  gelu (a case), torch, nan: as ever",
        "2 of 2 checks passed",
    ]


def test_calls_with_different_backends_have_a_table_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    titles = [line for line in lines if "(request: auto)" in line]
    assert "gelu: torch (request: auto)" in titles  # both calls have the same backends
    assert "causal_conv: conv1d (request: auto) for plain; state" in titles
    assert "causal_conv: reference (request: auto) for documents and state" in titles
    start = lines.index("optional libraries")
    end = lines.index(f"products in few bits by Transformer Engine  [on request only, {NEVER_RUN}]")
    assert end - start == 6  # five libraries
    recipes = [line.split()[0] for line in lines[end + 1 :]]
    assert recipes == ["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4", "nvfp4-nearest"]
    assert len({line.index("cannot") for line in lines[end + 1 :]}) == 1


def test_defaults_are_a_cpu_float32_all_dtypes_and_all_inputs() -> None:
    parse = build_parser().parse_args
    assert (parse(["list"]).device, parse(["list"]).dtype) == ("cpu", "float32")
    check = parse(["check"])
    assert (check.ops, check.device) == ([], "cpu")
    assert check.dtype == ["float64", "float32", "bfloat16", "float16"]
    assert check.inputs == list(check_module.INPUTS)
    bench = parse(["bench"])
    assert (bench.ops, bench.device, bench.dtype, bench.size) == ([], "cpu", "float32", "medium")
    assert (bench.rounds, bench.backends, bench.picture) == (ROUNDS, None, None)


def test_a_single_round_can_be_measured_and_no_fewer(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "swiglu", "--size", "small", "--backends", "reference", "--rounds"]
    assert main([*words, "1"]) == 0
    assert main([*words, "0"]) == 1 and main([*words, "-1"]) == 1
    assert "--rounds -1 is not positive" in capsys.readouterr().err


class Terminal(io.StringIO):
    """A terminal that shows what is written when it is flushed."""

    shown = ""

    def flush(self) -> None:
        self.shown = self.getvalue()

    def isatty(self) -> bool:
        return True


def shown(seconds: list[float], total: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the texts on a terminal of 40 columns while items take some seconds each."""
    terminal = Terminal()
    now = iter([100.0, *(100.0 + each for each in seconds)])
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    monkeypatch.setenv("COLUMNS", "40")
    items = list(range(len(seconds)))
    for number, item in enumerate(progress(items, total, "checks")):
        assert item == number and terminal.shown == terminal.getvalue()
    assert number == len(items) - 1 and terminal.shown == terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")  # the line is gone at the end
    return terminal.getvalue().removesuffix("\r\x1b[K").split("\r")[1:]


def test_a_terminal_shows_the_number_the_rate_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = shown([2.0, 4.0, 5.0], 8, monkeypatch)
    assert [line.rstrip() for line in lines] == [
        "1/8 checks, 0.5/s, 14 s left",
        "2/8 checks, 0.5/s, 12 s left",
        "3/8 checks, 0.6/s, 8 s left",
    ]
    assert {len(line) for line in lines} == {39}  # covers the line before; the last column is free


def test_a_line_is_shown_at_most_ten_times_a_second_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = shown([0.05, 0.125, 0.1875, 0.25, 0.3125], 5, monkeypatch)
    assert [line.split()[0] for line in lines] == ["2/5", "4/5", "5/5"]
    assert [line.split()[2] for line in lines] == ["16.0/s,", "16.0/s,", "16.0/s,"]
    assert shown([0.0], 1, monkeypatch)[0].startswith("1/1 checks, ")  # a clock that stands still


def test_a_long_line_is_cut_and_no_terminal_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = shown([0.5], 10**30, monkeypatch)
    assert len(line) == 39
    monkeypatch.undo()
    assert list(progress([3, 4], 2, "checks")) == [3, 4]
    assert capsys.readouterr().err == ""


def test_the_line_is_removed_if_the_work_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    items = progress([1, 2], 2, "checks")
    next(items)
    items.close()  # type: ignore[attr-defined]
    assert terminal.getvalue() == "\r\x1b[K"
