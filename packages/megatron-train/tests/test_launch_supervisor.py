"""When the supervisor kills ranks, with ranks that follow a script and a clock of half seconds."""

import io
import signal
from types import SimpleNamespace

import pytest
from megatron_train.launch import environment, supervisor
from megatron_train.launch import launch as launch_module
from megatron_train.launch.environment import free_port, usable_cores
from megatron_train.launch.link import FailureReport
from megatron_train.launch.outcome import RankExit
from megatron_train.launch.supervisor import Supervisor

FOREVER = float("inf")
DISK = FailureReport("own", "disk full")


class Clock:
    """A selector whose every wait takes half a second."""

    def __init__(self):
        self.now, self.registered, self.unregistered = 0.0, [], []
        self.keys = [SimpleNamespace(data=lambda: None, fileobj="open")]

    def select(self, timeout):
        assert 0 < timeout < 1
        self.now += 0.5
        assert self.now < 1000, "it waits forever"
        return [(key, 1) for key in self.keys]

    def unregister(self, file):
        self.unregistered.append(file)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class ScriptedRank:
    """A rank that ends, reports and is suspended at given seconds of the clock."""

    errors = b""

    def __init__(self, rank, end=FOREVER, status=0, report=None, reports=0.0, suspended=()):
        self.rank, self._end, self._status = rank, end, status
        self._report, self._reports, self._suspended = report, reports, suspended
        self.killed = None
        self.process = SimpleNamespace(returncode=None)

    def poll(self):
        if self.clock.now >= self._end and self.process.returncode is None:
            self.process.returncode = self._status
        return self.process.returncode

    @property
    def report(self):
        return self._report if self.clock.now >= self._reports else None

    @property
    def suspended(self):
        return any(start <= self.clock.now < end for start, end in self._suspended)

    def kill(self):
        if self.process.returncode is None:
            self.killed, self.process.returncode = self.clock.now, -9

    def register(self, selector):
        selector.registered.append(self.rank)

    def close(self, selector):
        pass


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: made.now)
    monkeypatch.setattr(supervisor.selectors, "DefaultSelector", lambda: made)
    return made


@pytest.mark.parametrize(
    ("ranks", "timeout", "killed"),
    [
        # A failure, whether or not the rank ends, leaves the others the time of grace.
        ([{"end": 1, "status": 1}, {}], None, [None, 3]),
        ([{"end": 1, "status": -9}, {"end": 2.5}, {}], None, [None, None, 3]),
        ([{"report": DISK, "reports": 1}, {}], None, [3, 3]),
        # A rank that ended without error gives them also the time that they wait for it.
        ([{"end": 1}, {}], 1.0, [None, 4]),
        ([{"end": 1, "status": 143}, {}], 1.0, [None, 4]),
        ([{"end": 1}, {"end": 100}], None, [None, None]),
        ([{"end": 1, "status": 143}, {"end": 100}], None, [None, None]),
        # The earliest of several limits counts.
        ([{"end": 1}, {"end": 1.5, "status": 1}, {}], 1.0, [None, None, 3.5]),
        ([{"end": 1, "status": 1}, {"end": 2}, {}], 9.0, [None, None, 3]),
        # A suspended rank is killed when others may have missed it, and only then.
        ([{"suspended": [(1, FOREVER)]}, {"end": 9}], 1.0, [3, 5]),
        ([{"suspended": [(1, 99)], "end": 99}, {"end": 9}], None, [None, None]),
        ([{"suspended": [(1, 2.5), (3, 4.5)], "end": 6}, {"end": 6}], 1.0, [None, None]),
        ([{"suspended": [(1, 9)], "end": 9}, {"suspended": [(1, 9)], "end": 9}], 1.0, [None] * 2),
        # Ranks that are all suspended do not notice a failure, also that of a killed rank.
        ([{"suspended": [(1, FOREVER)]}, {"suspended": [(3.5, FOREVER)]}], 1.0, [3, 3.5]),
        ([{"end": 1, "status": 1}, {"suspended": [(0, FOREVER)]}], None, [None, 1]),
    ],
)  # fmt: skip
def test_ranks_are_killed_at_their_limits_and_not_before(clock, ranks, timeout, killed):
    made = [ScriptedRank(number, **script) for number, script in enumerate(ranks)]
    for rank in made:
        rank.clock = clock
    exits = Supervisor(made, grace=2.0, timeout=timeout).run()
    assert [rank.killed for rank in made] == killed
    assert clock.registered == [rank.rank for rank in made]
    assert sorted(one.rank for one in exits) == list(range(len(made)))
    by_rank = {one.rank: one for one in exits}
    assert [by_rank[rank.rank].killed for rank in made] == [end is not None for end in killed]


def test_how_a_rank_ended_is_recorded_in_the_order_of_the_ends(clock):
    made = [
        ScriptedRank(0, suspended=[(2, FOREVER)]),
        ScriptedRank(1, end=2, status=1, report=DISK),
        ScriptedRank(2, end=1),
    ]
    made[1].errors = b"disk \xff"
    for rank in made:
        rank.clock = clock
    clock.keys.append(SimpleNamespace(data=lambda: b"", fileobj="at its end"))
    assert Supervisor(made, grace=9.0).run() == [
        RankExit(2, 0),
        RankExit(1, 1, DISK, "disk �"),
        RankExit(0, -9, killed=True, suspended=True),
    ]
    assert set(clock.unregistered) == {"at its end"}
    assert clock.now == 2.0


def test_a_first_signal_is_forwarded_and_a_second_kills(clock, monkeypatch):
    sent, select, heard = {1: signal.SIGTERM, 3: signal.SIGINT}, clock.select, []

    def interrupted(timeout):
        found = select(timeout)
        if clock.now in sent:
            signal.raise_signal(sent[clock.now])
        return found

    clock.select = interrupted
    monkeypatch.setattr(
        ScriptedRank,
        "signal",
        lambda rank, number: heard.append((rank.rank, number)),
        raising=False,
    )
    made = [ScriptedRank(0), ScriptedRank(1, end=0.5), ScriptedRank(2)]
    for rank in made:
        rank.clock = clock
    supervising = Supervisor(made)
    supervising.run()
    assert supervising.signals == [signal.SIGTERM, signal.SIGINT]
    assert heard == [(0, signal.SIGTERM), (2, signal.SIGTERM)]
    assert [rank.killed for rank in made] == [3, None, 3]


def test_no_rank_survives_an_error_of_the_supervisor(clock):
    made = [ScriptedRank(rank) for rank in range(3)]
    for rank in made:
        rank.clock = clock
    made[1].poll = lambda: 1 / 0
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError):
        Supervisor(made).run()
    assert [rank.killed for rank in made] == [0.5] * 3
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def launched(monkeypatch):
    """Returns a function that launches ranks which are recorded instead of started."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")

    def start(reports, ranks, cores, **options):
        made, killed, settings = [], [], []
        reports = iter(reports)

        class Recorded:
            def __init__(self, rank, command, environment):
                words = command(7, 8 if rank == 0 else None)
                made.append((rank, words, environment, out.buffer.getvalue().decode()))

            def kill(self):
                killed.append(self)

        def supervise(started, **limits):
            settings.append(limits)
            exits = [RankExit(rank, 0, next(reports)) for rank in range(len(started))]
            return SimpleNamespace(run=lambda: exits, signals=[])

        monkeypatch.setattr(launch_module, "RankProcess", Recorded)
        monkeypatch.setattr(launch_module, "Supervisor", supervise)
        monkeypatch.setattr(launch_module, "usable_cores", lambda: cores)
        monkeypatch.setattr("sys.stdout", out)
        outcome = launch_module.launch(["python", "-m", "x"], ["--y"], ranks, **options)
        assert len(killed) == len(made)
        return outcome, made, settings

    return start


def test_a_launch_is_given_up_after_five_taken_ports(launched):
    taken = FailureReport("port", "MASTER_PORT is taken", 1)
    outcome, made, settings = launched([taken] * 99, 1, 1)
    assert (len(made), len(settings), outcome.port_taken) == (5, 5, True)
    outcome, made, settings = launched([taken, *[None] * 9], 1, 1, grace=3.0, timeout=4.0)
    assert (len(made), outcome.status) == (2, 0)
    assert settings == [{"grace": 3.0, "timeout": 4.0}] * 2


@pytest.mark.parametrize(
    ("ranks", "cores", "notice", "threads"),
    [
        (2, 7, "2 ranks of 3 threads each (set by OMP_NUM_THREADS)\n", "3"),
        (4, 7, "4 ranks of 1 thread each (set by OMP_NUM_THREADS)\n", "1"),
        (3, 2, "3 ranks of 1 thread each (set by OMP_NUM_THREADS)\n", "1"),
    ],
)
def test_ranks_share_the_cores_and_the_user_sees_it_first(
    launched, monkeypatch, ranks, cores, notice, threads
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    outcome, made, settings = launched([None] * ranks, ranks, cores)
    assert outcome.status == 0 and settings == [{"grace": 10.0, "timeout": None}]
    assert [(rank, words) for rank, words, _, _ in made] == [
        (rank, ["python", "-m", "x", "7", "8" if rank == 0 else "-", "--y"])
        for rank in range(ranks)
    ]
    for rank, _, variables, printed in made:
        assert (variables["RANK"], variables["WORLD_SIZE"]) == (str(rank), str(ranks))
        assert variables["OMP_NUM_THREADS"] == threads and printed == notice
    assert len({variables["MASTER_PORT"] for _, _, variables, _ in made}) == 1


def test_cores_are_those_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr(environment.os, "cpu_count", lambda: 64)
    asked = []
    monkeypatch.setattr(
        environment.os,
        "sched_getaffinity",
        lambda pid: asked.append(pid) or {1, 4, 9},
        raising=False,
    )
    assert usable_cores() == 3 and asked == [0]
    monkeypatch.delattr(environment.os, "sched_getaffinity")
    assert usable_cores() == 64
    monkeypatch.setattr(environment.os, "cpu_count", lambda: None)
    assert usable_cores() == 1


def test_a_free_port_is_one_that_the_system_chooses():
    assert 1024 <= free_port() < 2**16
