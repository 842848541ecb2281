"""The command as one rank of several, and which process prints notes."""

import logging
import os
import sys

import pytest
from megatron_train.cli import layout, rank
from megatron_train.cli.main import build_parser, main
from megatron_train.errors import TrainError, UsageError
from megatron_train.launch.link import FailureReport

from .test_configuration import MINIMAL

WORDS = ["layout", "--world-size", "2"]
"""A command whose parser is small; all commands start alike."""


class EndedError(Exception):
    """The process has ended, with a status."""


class Link:
    """The connection to a parent that does not end."""

    made: list["Link"]

    def __init__(self, descriptor):
        self.descriptor, self.waits, self.reports = descriptor, False, []
        self.made.append(self)

    def exit_with_parent(self):
        self.waits = True

    def send(self, report):
        self.reports.append(report)


@pytest.fixture
def started(monkeypatch):
    """Returns a function that runs a command as a rank; gives the status and the link."""

    def end(status):
        raise EndedError(status)

    monkeypatch.setattr(Link, "made", [], raising=False)
    monkeypatch.setattr(rank, "ParentLink", Link)
    monkeypatch.setattr(rank, "exit_now", end)
    monkeypatch.setattr(sys, "stderr", sys.stderr)

    def start(run, screen="-"):
        monkeypatch.setattr(layout, "run", run)
        monkeypatch.setattr(sys, "argv", ["rank", "17", screen, *WORDS])
        with pytest.raises(EndedError) as ended:
            rank.main()
        (link,) = Link.made
        assert link.descriptor == 17 and link.waits
        return ended.value.args[0], link.reports

    return start


@pytest.mark.parametrize("status", [0, 143])
def test_a_rank_neither_starts_ranks_nor_prints_notes(started, status):
    seen = []

    def run(arguments):
        seen.append((arguments.nproc_per_node, arguments.print_notes, arguments.words))
        return status

    assert started(run) == (status, []) and seen == [(None, False, WORDS)]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (TrainError("disk full"), 1, "own"),
        (UsageError("no such flag"), 2, "own"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (KeyError("x"), 1, "bug"),
        (SystemExit(3), 3, None),
        (SystemExit(None), 0, None),
        (SystemExit("text"), 1, None),
    ],
    ids=repr,
)
def test_a_rank_reports_its_error_to_the_parent_and_ends_with_its_status(
    started, error, status, kind, capsys
):
    def run(arguments):
        raise error

    found, reports = started(run)
    assert found == status and [report.kind for report in reports] == [kind] * (kind is not None)
    assert all(isinstance(each, FailureReport) and each.status == status for each in reports)
    assert capsys.readouterr().err == ""  # the parent prints it


def test_the_first_rank_writes_warnings_to_the_terminal_of_the_parent(started, capsys):
    ours, theirs = os.pipe()

    def run(arguments):
        sys.stderr.write("warning \udc80\n")  # a line is passed on when it ends
        assert os.read(ours, 100) == b"warning \\udc80\n"
        return 0

    assert started(run, str(theirs)) == (0, [])
    sys.stderr.close()
    os.close(ours)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("notes", "number", "printed"),
    [(True, None, True), (True, "0", True), (True, "1", False), (False, "0", False)],
)
def test_one_process_prints_notes(notes, number, printed, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    if number is not None:
        monkeypatch.setenv("RANK", number)
    words = f"pretrain gpt {MINIMAL} --sequence-parallel --print-config"
    arguments = build_parser().parse_args(words.split())
    arguments.print_notes = notes
    assert arguments.run(arguments) == 0
    shown = capsys.readouterr()
    note = "megatron-train: note: --sequence-parallel has no effect with "
    assert shown.err.startswith(note if printed else "") and bool(shown.err) == printed
    assert "seed: 1234" in shown.out


def test_the_command_has_a_version(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    name, version = capsys.readouterr().out.split()
    assert left.value.code == 0 and name == "megatron-train" and version[0].isdecimal()


@pytest.mark.parametrize(("words", "ranks"), [("", None), ("1", None), ("2", 2)])
def test_the_number_of_ranks_is_that_of_the_environment_unless_they_are_started(
    words, ranks, monkeypatch
):
    def resolve(arguments, count, tokenizers):
        raise EndedError(count)

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    given = f"--nproc-per-node {words}" if words else ""
    arguments = build_parser().parse_args(f"pretrain gpt {MINIMAL} {given}".split())
    arguments.resolve = resolve
    with pytest.raises(EndedError) as ended:
        arguments.run(arguments)
    assert ended.value.args == (ranks,)


# -- ranks that another program started ------------------------------------------------------------


@pytest.fixture
def module():
    return sys.modules[main.__module__]


@pytest.mark.parametrize(
    ("number", "size", "several"),
    [
        (None, None, False),
        (None, "2", False),
        ("1", "1", False),
        ("1", None, True),
        ("1", "2", True),
    ],
)
def test_a_rank_of_several_ends_at_once_and_names_itself(
    number, size, several, module, tmp_path, monkeypatch, capsys
):
    ended, whole, file = [], [], tmp_path / "error.json"
    monkeypatch.setattr(module, "exit_now", ended.append)
    monkeypatch.setattr(module, "write_whole_lines", whole.append)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    for name, value in (("RANK", number), ("WORLD_SIZE", size)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert main(WORDS) == 0
    assert not file.exists() and whole == [sys.stdout] * several
    assert main([*WORDS[:-1], "0"]) == 2
    line = "--world-size must be positive, got 0\n"
    rank = "rank 1: " if several else ""
    assert capsys.readouterr().err == f"megatron-train: error: {rank}{line}" and file.exists()

    def fail(arguments):
        raise KeyError("a bug")

    monkeypatch.setattr(layout, "run", fail)
    if not several:
        with pytest.raises(KeyError, match="a bug"):
            main(WORDS)
        assert ended == []
        return
    assert main(WORDS) == 1 and ended == [0, 2, 1]
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback") and shown.endswith("KeyError: 'a bug'\n")


@pytest.mark.parametrize("several", [False, True])
def test_a_reader_that_is_gone_and_an_interrupt_have_their_statuses(
    several, module, monkeypatch, capsys
):
    ended = []
    monkeypatch.setattr(module, "exit_now", ended.append)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    if several:
        monkeypatch.setenv("RANK", "0")
    for error, status, line in (
        (KeyboardInterrupt(), 130, "megatron-train: interrupted\n"),
        (BrokenPipeError(), 141, ""),
    ):

        def fail(arguments, error=error):
            raise error

        monkeypatch.setattr(layout, "run", fail)
        assert main(WORDS) == status and capsys.readouterr().err == line
    assert ended == [130, 141] * several
    sys.stdout.close()


def test_a_process_that_ends_at_once_has_passed_on_its_output(module, monkeypatch):
    done = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def flush(self):
            done.append(self.name)

    monkeypatch.setattr(logging, "shutdown", lambda: done.append("logs"))
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Stream(name))
    monkeypatch.setattr(os, "_exit", done.append)
    module.exit_now(7)
    monkeypatch.undo()
    assert done == ["logs", "stdout", "stderr", 7]
