"""The command as one rank of several, and which process prints notes."""

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
