import os
import signal
import socket

import pytest
from megatron_train.launch.link import FailureReport, ParentLink, decode_report, encode_report
from megatron_train.launch.outcome import LaunchOutcome, RankExit, format_ranks, launch_outcome

DP = "all_reduce of gradient bucket 1 of 1 ('b' ...) on axis 'dp' (ranks 0-3)"
SUSPENDED = RankExit(3, -9, killed=True, suspended=True)


def missed(rank, text):
    return RankExit(rank, 1, FailureReport("peer", text))


def own(rank, text, status=1):
    return RankExit(rank, status, FailureReport("own", text, status))


def test_ranks_that_finish_give_no_message():
    assert launch_outcome([RankExit(1, 0), RankExit(0, 0)]) == LaunchOutcome(0)
    assert launch_outcome([RankExit(1, 143), RankExit(0, 143)]) == LaunchOutcome(143)
    first = launch_outcome([RankExit(1, 0), RankExit(2, 143), RankExit(0, 130)])
    assert (first.status, first.message, first.interrupted, first.port_taken) == (
        *(143, ""),
        *(False, False),
    )


def test_equal_messages_are_printed_once_with_their_ranks():
    every_rank = [own(rank, "no such file", 2) for rank in (1, 0, 2)]
    assert launch_outcome(every_rank) == LaunchOutcome(2, "no such file")
    some = [own(2, "disk full"), own(0, "disk full"), RankExit(1, -9, killed=True)]
    assert launch_outcome(some) == LaunchOutcome(1, "ranks 0, 2: disk full")
    both = [own(1, "disk full"), own(0, "disk full")]
    assert launch_outcome(both) == LaunchOutcome(1, "disk full")
    assert launch_outcome(both[:1]) == LaunchOutcome(1, "rank 1: disk full")


def test_an_error_that_a_rank_repeats_is_reported_by_the_rank_that_had_it():
    repeated = [own(0, "rank 2: a.bin is torn"), own(2, "a.bin is torn"), own(1, "too late")]
    assert launch_outcome(repeated) == LaunchOutcome(1, "rank 2: a.bin is torn")
    alone = launch_outcome([own(0, "rank 2: a.bin is torn"), RankExit(1, 0)])
    assert alone == LaunchOutcome(1, "rank 0: rank 2: a.bin is torn")


def test_a_rank_that_failed_by_itself_precedes_waiting_ranks():
    exits = [missed(0, f"rank 2 did not join {DP}"), own(2, "good.bin is torn"), own(1, "other")]
    assert launch_outcome(exits) == LaunchOutcome(1, "rank 2: good.bin is torn")


def test_a_bug_has_its_traceback_and_rank():
    bug = FailureReport("bug", "KeyError: 'x'", 1, "Traceback\n  here\nKeyError: 'x'\n")
    outcome = launch_outcome([missed(0, f"rank 1 did not join {DP}"), RankExit(1, 1, bug)])
    assert outcome.details == bug.traceback
    assert outcome.message == "rank 1: KeyError: 'x' (a bug; its traceback is above)"
    named = FailureReport("bug", "ValueError: rank 1 did not fit", 1, "Traceback\n")
    outcome = launch_outcome([RankExit(0, 1, named), missed(1, f"rank 0 did not join {DP}")])
    assert outcome.message == f"rank 0: {named.message} (a bug; its traceback is above)"


def test_a_killed_rank_is_named_with_the_message_of_a_waiting_rank():
    exits = [
        RankExit(3, -signal.SIGKILL),
        missed(0, "rank 1 did not join all_gather on axis 'tp' (ranks 0-1)"),
        missed(2, "all_reduce failed because rank 1 gave up: late"),
        missed(1, f"rank 3 did not join {DP}: dead"),
    ]
    death = "rank 3 was killed by SIGKILL (the system kills processes when memory runs out)"
    assert launch_outcome(exits) == LaunchOutcome(
        137, f"{death}; rank 1: rank 3 did not join {DP}: dead"
    )


@pytest.mark.parametrize(
    ("errors", "why", "detail"),
    [
        ("", "", ""),
        ("[W] noise\nterminate called\n  what():  [enforce] 4, 8\n", " ([enforce] 4, 8)", ""),
        ("Fatal Python error: Aborted\n", "", "[rank 0] Fatal Python error: Aborted\n"),
    ],
)  # fmt: skip
def test_an_abort_quotes_the_library(errors, why, detail):
    exits = [RankExit(0, -signal.SIGABRT, errors=errors), missed(1, "rank 0 did not send")]
    line = f"rank 0 was killed by SIGABRT{why}; rank 1: rank 0 did not send"
    assert launch_outcome(exits) == LaunchOutcome(134, line, detail)


def test_ranks_killed_by_the_same_signal_are_named_together():
    exits = [RankExit(rank, -signal.SIGKILL) for rank in (2, 0, 1)]
    assert launch_outcome(exits).message.startswith("ranks 0-2 were killed by SIGKILL")
    words = ("the pair is closed", "too late")
    aborts = [
        RankExit(rank, -signal.SIGABRT, errors=f"terminate\n  what():  {text}\n")
        for rank, text in zip((1, 0), words, strict=True)
    ]
    line = "ranks 0-1 were killed by SIGABRT (the pair is closed)"
    assert launch_outcome(aborts) == LaunchOutcome(134, line)


@pytest.mark.parametrize(
    "text",
    [
        f"rank 3 did not join {DP}: dead, suspended or late",
        f"ranks 1, 3 did not join {DP}: dead, suspended or late",
        f"ranks 2-3 did not join {DP}: dead, suspended or late",
        f"{DP} failed because rank 3 gave up: rank 3 did not join",
        "rank 3 (stage 1 of 2) did not receive the gradient of micro-batch 2 on axis 'pp'",
        "rank 3 of 4 did not arrive in time: see their own output",
    ],
)
def test_a_waiting_rank_that_names_the_suspended_rank_is_quoted(text):
    exits = [missed(0, f"rank 2 did not join {DP}"), own(1, text), missed(2, "failed"), SUSPENDED]
    assert launch_outcome(exits) == LaunchOutcome(
        1, f"rank 3 is suspended (SIGSTOP); rank 1: {text}"
    )


def test_suspended_ranks_are_named_together_and_before_late_ones():
    text = "rank 3 did not answer"
    exits = [
        missed(0, f"rank 2 did not join {DP}"),
        missed(1, text),
        RankExit(2, -9, killed=True),
        SUSPENDED,
    ]
    line = f"rank 3 is suspended (SIGSTOP); rank 1: {text}"
    assert launch_outcome(exits) == LaunchOutcome(1, line)
    exits[2] = RankExit(2, -9, killed=True, suspended=True)
    assert launch_outcome(exits).message == (
        f"ranks 2-3 are suspended (SIGSTOP); rank 0: rank 2 did not join {DP}"
    )


def test_a_late_rank_is_not_called_suspended():
    late = RankExit(2, -9, killed=True)
    named = missed(0, f"rank 2 did not join {DP}")
    assert launch_outcome([named, late]) == LaunchOutcome(1, f"rank 0: rank 2 did not join {DP}")
    unnamed = missed(0, "start-up on axis 'world': the ranks did not meet")
    assert launch_outcome([unnamed, late]).message.startswith(
        "rank 2 did not answer; rank 0: start-up"
    )
    ended = launch_outcome([RankExit(0, 0), late])
    assert (ended.status, "rank 2 did not end" in ended.message) == (1, True)


def test_a_message_with_an_axis_is_preferred_if_no_rank_is_named():
    exits = [missed(0, "a connection broke"), missed(1, f"{DP} failed on all its ranks")]
    assert launch_outcome(exits) == LaunchOutcome(1, f"rank 1: {DP} failed on all its ranks")


def test_an_exit_without_report_shows_the_last_output():
    outcome = launch_outcome(
        [RankExit(0, 0), RankExit(1, 5, errors="warning: x\nwild.so: cannot load\n")]
    )
    assert outcome.status == 5
    assert outcome.message == "rank 1 ended with status 5: wild.so: cannot load"
    assert outcome.details == "[rank 1] warning: x\n[rank 1] wild.so: cannot load\n"


def test_an_interrupt_is_not_an_error():
    exits = [RankExit(1, -signal.SIGINT), missed(0, f"rank 1 did not join {DP}")]
    assert launch_outcome(exits, [signal.SIGINT]) == LaunchOutcome(130, interrupted=True)
    stopped = FailureReport("interrupted", "interrupted", 130)
    assert launch_outcome([RankExit(0, 130, stopped)]) == LaunchOutcome(130, interrupted=True)
    for statuses, status in (((143, 130), 143), ((1, 143), 143), ((1, 1), 130)):
        ends = [RankExit(rank, each, stopped) for rank, each in enumerate(statuses)]
        assert launch_outcome(ends) == LaunchOutcome(status, interrupted=True)
    killed = [RankExit(rank, -9, killed=True) for rank in (0, 1)]
    assert launch_outcome(killed, [signal.SIGINT, signal.SIGTERM]) == LaunchOutcome(
        143, interrupted=True
    )
    assert launch_outcome([RankExit(0, 0), RankExit(1, 0)], [signal.SIGINT]) == LaunchOutcome(0)
    assert launch_outcome([own(1, "disk full")], [signal.SIGTERM]).message == "rank 1: disk full"


def test_a_taken_port_is_recognized():
    exits = [
        RankExit(0, 1, FailureReport("port", "MASTER_PORT 5 is taken")),
        missed(1, "no answer"),
    ]
    assert launch_outcome(exits).port_taken


def test_ranks_are_formatted_as_ranges():
    assert format_ranks([4]) == "rank 4"
    assert format_ranks([5, 0, 2, 1]) == "ranks 0-2, 5"
    assert format_ranks([6, 0, 5, 3, 2, 8]) == "ranks 0, 2-3, 5-6, 8"


def test_an_incomplete_report_is_none():
    report = FailureReport("bug", "naïve\nline", 1, "Traceback\n")
    assert decode_report(encode_report(report)) == report
    assert decode_report(encode_report(report)[:-1]) is None and decode_report(b"") is None


def test_ranks_end_by_a_signal_or_by_themselves():
    ends = [(RankExit(0, status).by_signal, RankExit(0, status).clean) for status in (-1, 0, 1)]
    assert ends == [(True, False), (False, True), (False, False)]
    hung_up = launch_outcome([RankExit(0, -signal.SIGHUP), RankExit(1, 0)])
    assert hung_up.message == "rank 0 was killed by SIGHUP"


@pytest.mark.parametrize("alone", [True, False])
def test_a_rank_without_parent_ends_with_its_group_if_that_is_its_own(alone, monkeypatch):
    ours, theirs = socket.socketpair()
    ours.set_inheritable(True)  # as a rank inherits it
    link = ParentLink(ours.detach())
    assert not link._socket.get_inheritable()
    theirs.close()
    killed = []
    monkeypatch.setattr(os, "getpgrp", lambda: os.getpid() if alone else os.getppid())
    monkeypatch.setattr(os, "killpg", lambda *words: killed.append(("group", *words)))
    monkeypatch.setattr(os, "kill", lambda *words: killed.append(("process", *words)))
    link._wait()
    own = os.getpid(), signal.SIGKILL
    assert killed == ([("group", *own)] if alone else []) + [("process", *own)]
