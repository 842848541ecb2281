"""The process of a rank as its supervisor sees it: how it ends, and what remains of it."""

import os
import selectors
import signal

import pytest
from megatron_train.launch.process import RankProcess
from waiting import wait_until


def start(*words):
    """Starts a rank that runs a program instead of a training."""
    return RankProcess(1, lambda link, screen: words, os.environ)


@pytest.fixture
def selector():
    with selectors.DefaultSelector() as made:
        yield made


def test_an_ended_rank_leaves_nothing_open_or_registered(selector, capsys):
    rank = start("sh", "-c", "printf 'one\\ntwo'; echo warning >&2")
    rank.register(selector)
    assert len(selector.get_map()) == 3
    wait_until(lambda: rank.poll() is not None)
    rank.close(selector)
    assert len(selector.get_map()) == 0
    assert (capsys.readouterr().out, rank.errors) == ("[rank 1] one\n[rank 1] two\n", b"warning\n")
    assert rank._link.fileno() == -1
    assert rank.process.stdout.closed and rank.process.stderr.closed


def test_what_another_process_holds_open_is_not_awaited(selector, capsys):
    rank = start("sh", "-c", "sleep 600 & echo started")
    rank.process.wait()
    try:
        rank.close(selector)
    finally:
        os.killpg(rank.process.pid, signal.SIGKILL)
    assert (capsys.readouterr().out, rank.report) == ("[rank 1] started\n", None)


def test_a_connection_that_breaks_is_at_its_end(selector):
    rank = start("sleep", "600")
    rank._link.send(b"unread")  # so that the end of the rank resets the connection
    rank.kill()
    rank.close(selector)
    assert (rank.poll(), rank.report) == (-signal.SIGKILL, None)


@pytest.mark.parametrize("tells", [True, False])
def test_a_rank_runs_until_it_ends_also_where_suspension_is_unknown(monkeypatch, selector, tells):
    if not tells:
        monkeypatch.delattr(os, "waitid", raising=False)
    rank = start("sleep", "600")
    assert rank.poll() is None and not rank.suspended
    os.kill(rank.process.pid, signal.SIGSTOP)
    if tells:
        wait_until(lambda: rank.suspended)
    assert rank.poll() is None and rank.suspended == tells
    os.kill(rank.process.pid, signal.SIGTERM)
    os.kill(rank.process.pid, signal.SIGCONT)
    wait_until(lambda: rank.poll() is not None)
    assert rank.poll() == -signal.SIGTERM and not rank.suspended
    rank.close(selector)
