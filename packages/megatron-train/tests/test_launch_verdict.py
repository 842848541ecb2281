import signal

import pytest
from megatron_train.launch.link import Report, decode, encode
from megatron_train.launch.verdict import Ending, Verdict, in_words, judge

DP = "all_reduce of gradient bucket 1 of 1 ('b' ...) on axis 'dp' (ranks 0-3)"
FROZEN = Ending(3, -9, killed=True, frozen=True)


def missed(rank, text):
    return Ending(rank, 1, Report("peer", text))


def own(rank, text, status=1):
    return Ending(rank, status, Report("own", text, status))


def test_ranks_that_come_to_their_end_need_no_words():
    assert judge([Ending(1, 0), Ending(0, 0)]) == Verdict(0)
    assert judge([Ending(1, 143), Ending(0, 143)]) == Verdict(143)


def test_what_all_ranks_say_is_said_once_and_what_some_say_names_them():
    everybody = [own(rank, "no such file", 2) for rank in (1, 0, 2)]
    assert judge(everybody) == Verdict(2, "no such file")
    some = [own(2, "disk full"), own(0, "disk full"), Ending(1, -9, killed=True)]
    assert judge(some) == Verdict(1, "ranks 0, 2: disk full")


def test_the_rank_that_failed_by_itself_goes_before_those_that_missed_it():
    endings = [missed(0, f"rank 2 did not join {DP}"), own(2, "good.bin is torn"), own(1, "other")]
    assert judge(endings) == Verdict(1, "rank 2: good.bin is torn")


def test_a_bug_is_shown_whole_and_named():
    bug = Report("bug", "KeyError: 'x'", 1, "Traceback\n  here\nKeyError: 'x'\n")
    verdict = judge([missed(0, f"rank 1 did not join {DP}"), Ending(1, 1, bug)])
    assert verdict.detail == bug.traceback
    assert verdict.line == "rank 1: KeyError: 'x' (a bug; its traceback is above)"


def test_a_killed_rank_is_named_with_the_words_of_the_rank_that_missed_it():
    endings = [
        Ending(3, -signal.SIGKILL),
        missed(0, "rank 1 did not join all_gather on axis 'tp' (ranks 0-1)"),
        missed(2, "all_reduce failed because rank 1 gave up: late"),
        missed(1, f"rank 3 did not join {DP}: dead"),
    ]
    death = "rank 3 was killed by SIGKILL (as the system does when memory runs out)"
    assert judge(endings) == Verdict(137, f"{death}; rank 1: rank 3 did not join {DP}: dead")


@pytest.mark.parametrize(
    ("errors", "why", "detail"),
    [
        ("", "", ""),
        ("[W] noise\nterminate called\n  what():  [enforce] 4, 8\n", " ([enforce] 4, 8)", ""),
        ("Fatal Python error: Aborted\n", "", "[rank 0] Fatal Python error: Aborted\n"),
    ],
)  # fmt: skip
def test_an_abort_says_what_the_library_said(errors, why, detail):
    endings = [Ending(0, -signal.SIGABRT, errors=errors), missed(1, "rank 0 did not send")]
    line = f"rank 0 was killed by SIGABRT{why}; rank 1: rank 0 did not send"
    assert judge(endings) == Verdict(134, line, detail)


def test_several_ranks_killed_alike_are_named_together():
    endings = [Ending(rank, -signal.SIGKILL) for rank in (2, 0, 1)]
    assert judge(endings).line.startswith("ranks 0-2 were killed by SIGKILL")


@pytest.mark.parametrize(
    "text",
    [
        f"rank 3 did not join {DP}: dead, frozen or late",
        f"ranks 1, 3 did not join {DP}: dead, frozen or late",
        f"ranks 2-3 did not join {DP}: dead, frozen or late",
        f"{DP} failed because rank 3 gave up: rank 3 did not join",
        "rank 3 (stage 1 of 2) did not take the gradient of micro-batch 2 on axis 'pp'",
        "rank 3 of 4 did not arrive in time: see their own output",
    ],
)
def test_of_the_ranks_that_miss_another_the_one_that_names_the_frozen_is_quoted(text):
    endings = [missed(0, f"rank 2 did not join {DP}"), own(1, text), missed(2, "failed"), FROZEN]
    assert judge(endings) == Verdict(1, f"rank 3 is frozen (SIGSTOP); rank 1: {text}")


def test_a_rank_that_is_merely_late_is_not_called_frozen():
    late = Ending(2, -9, killed=True)
    named = missed(0, f"rank 2 did not join {DP}")
    assert judge([named, late]) == Verdict(1, f"rank 0: rank 2 did not join {DP}")
    unnamed = missed(0, "start-up on axis 'world': the ranks did not meet")
    assert judge([unnamed, late]).line.startswith("rank 2 did not answer; rank 0: start-up")
    assert "rank 2 did not end" in judge([Ending(0, 0), late]).line


def test_the_axis_counts_among_words_that_name_nobody():
    endings = [missed(0, "a connection broke"), missed(1, f"{DP} failed on all its ranks")]
    assert judge(endings) == Verdict(1, f"rank 1: {DP} failed on all its ranks")


def test_an_end_without_a_word_shows_the_last_ones():
    verdict = judge([Ending(0, 0), Ending(1, 5, errors="warning: x\nwild.so: cannot load\n")])
    assert verdict.status == 5
    assert verdict.line == "rank 1 ended with status 5: wild.so: cannot load"
    assert verdict.detail == "[rank 1] warning: x\n[rank 1] wild.so: cannot load\n"


def test_an_interrupt_is_no_error_whatever_the_ranks_say_of_each_other():
    endings = [Ending(1, -signal.SIGINT), missed(0, f"rank 1 did not join {DP}")]
    assert judge(endings, [signal.SIGINT]) == Verdict(130, interrupted=True)
    stopped = Report("interrupted", "interrupted", 130)
    assert judge([Ending(0, 130, stopped)]) == Verdict(130, interrupted=True)
    killed = [Ending(rank, -9, killed=True) for rank in (0, 1)]
    assert judge(killed, [signal.SIGINT, signal.SIGTERM]) == Verdict(143, interrupted=True)
    assert judge([Ending(0, 0), Ending(1, 0)], [signal.SIGINT]) == Verdict(0)
    assert judge([own(1, "disk full")], [signal.SIGTERM]).line == "rank 1: disk full"


def test_a_taken_port_is_told_apart():
    endings = [Ending(0, 1, Report("port", "MASTER_PORT 5 is taken")), missed(1, "no answer")]
    assert judge(endings).port_taken


def test_ranks_in_words():
    assert in_words([4]) == "rank 4"
    assert in_words([5, 0, 2, 1]) == "ranks 0-2, 5"


def test_half_a_report_is_none():
    report = Report("bug", "naïve\nline", 1, "Traceback\n")
    assert decode(encode(report)) == report
    assert decode(encode(report)[:-1]) is None and decode(b"") is None
