"""No step of any schedule can hang on NCCL: every message meets its counterpart.

NCCL runs the messages of one communicator in order, and a message only when both ranks have posted
it. torch posts a single send or receive on a communicator of two ranks, and batched ones on the
group's communicator (`ProcessGroupNCCL::pointToPoint`). A sender and a receiver that use different
communicators wait forever. Gloo hides both errors: it matches messages by their tag.

Each rank runs its step alone, on torch's fake process group, and its posts and waits are recorded.
Then the records of all ranks are replayed together by NCCL's rules.
"""

from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.errors import LayoutError
from megatron_parallel.pipeline import (
    SCHEDULES,
    PipelineEngine,
    TensorSpec,
    check_micro_batches,
    find_schedule_kind,
)
from megatron_parallel.pipeline.runner import StageRunner
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

SHAPE = (1, 2)


class Message(NamedTuple):
    sends: bool
    peer: int


class Started(NamedTuple):
    """Messages that are posted together; `communicator` is the group's, or that of two ranks."""

    communicator: str
    messages: list[Message]


class Waited(NamedTuple):
    """A wait until the `number`-th post has completed, before which a rank computes no further."""

    number: int


Record = list[Started | Waited]


class Recorder:
    """Replaces torch's send and receive functions, for one rank after another."""

    def __init__(self) -> None:
        self.rank = 0
        self.record: Record = []

    def isend(self, tensor: Tensor, group: Any, tag: int, group_dst: int) -> Any:
        return self.alone(Message(True, group_dst))

    def irecv(self, tensor: Tensor, group: Any, tag: int, group_src: int) -> Any:
        return self.alone(Message(False, group_src))

    def send(self, tensor: Tensor, dst: int, group: Any) -> None:
        self.alone(Message(True, dst)).wait()

    def recv(self, tensor: Tensor, src: int, group: Any) -> None:
        self.alone(Message(False, src)).wait()

    def batch_isend_irecv(self, operations: list[dist.P2POp]) -> list[Any]:
        messages = [Message(each.op == self.isend, each.peer) for each in operations]
        return [self.start(Started("group", messages))]

    def alone(self, message: Message) -> Any:
        pair = f"{min(self.rank, message.peer)}:{max(self.rank, message.peer)}"
        return self.start(Started(pair, [message]))

    def start(self, started: Started) -> Any:
        self.record.append(started)
        number = sum(isinstance(each, Started) for each in self.record) - 1
        record = self.record

        class Work:
            def wait(self) -> None:
                record.append(Waited(number))

        return Work()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    made = Recorder()
    for module in (dist, distributed_c10d):
        for name in ("isend", "irecv", "send", "recv", "batch_isend_irecv"):
            monkeypatch.setattr(module, name, getattr(made, name))
    monkeypatch.setattr(StageRunner, "_agree", lambda *_: None)  # each rank is alone here
    yield made
    if dist.is_initialized():
        dist.destroy_process_group()


class Chunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(SHAPE))

    def forward(self, received: Tensor | None = None, *, given: Tensor | None = None) -> Tensor:
        x = given if received is None else received
        assert x is not None
        return x * self.gain


def run(
    recorder: Recorder,
    layout: ParallelLayout,
    rank: int,
    schedule: str,
    count: int,
    train: bool,
    group_size: int | None = None,
) -> Record:
    """Returns what one rank posts and waits for in a step."""
    recorder.rank, recorder.record = rank, []
    pp = layout.pp
    dist.init_process_group("fake", rank=rank, world_size=pp, store=dist.HashStore())
    ranks = tuple(range(pp))
    group = dist.new_group(list(ranks), timeout=timedelta(minutes=1))
    engine = PipelineEngine(
        Mesh(layout, rank, groups={ranks: group}),
        [Chunk() for _ in layout.stages(rank)],
        lambda output, batch: {"loss": output.sum()},
        inputs=lambda batch, stage: {} if stage else {"given": batch},
        stage_output_spec=lambda batch, stage: TensorSpec(SHAPE, torch.float32),
        schedule=schedule,
        group_size=group_size,
    )
    batches = [torch.ones(SHAPE)] * count
    if train:
        engine.run(batches, {"loss": 1.0})
    else:
        engine.evaluate(batches)
    dist.destroy_process_group()
    return recorder.record


class Player:
    """One rank's record on a device: a queue of posted messages for each communicator."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._place = self._number = 0
        self._queues: dict[str, list[tuple[int, list[Message]]]] = {}
        self._over: set[int] = set()

    def advance(self) -> bool:
        """Computes up to a wait for an incomplete message; returns whether it made progress."""
        before = self._place
        for each in self._record[self._place :]:
            if isinstance(each, Waited):
                if each.number not in self._over:
                    break
            else:
                queue = self._queues.setdefault(each.communicator, [])
                queue.append((self._number, list(each.messages)))
                self._number += 1
            self._place += 1
        return self._place > before

    def offered(self, communicator: str) -> list[Message]:
        """Returns the messages that run now on a communicator."""
        queue = self._queues.get(communicator)
        return queue[0][1] if queue else []

    def take(self, communicator: str, message: Message) -> None:
        queue = self._queues[communicator]
        number, messages = queue[0]
        messages.remove(message)
        if not messages:
            queue.pop(0)
            self._over.add(number)

    def communicators(self) -> list[str]:
        return [name for name, queue in self._queues.items() if queue]

    def done(self) -> bool:
        return self._place == len(self._record) and not self.communicators()


def hangs(records: list[Record]) -> bool:
    """Returns whether ranks end up waiting for one another."""
    players = [Player(record) for record in records]
    moved = True
    while moved:
        moved = sum(player.advance() for player in players) > 0  # each of them
        for rank, player in enumerate(players):
            for name in player.communicators():
                for message in list(player.offered(name)):
                    other = players[message.peer]
                    answer = Message(not message.sends, rank)
                    if message in player.offered(name) and answer in other.offered(name):
                        player.take(name, message)
                        other.take(name, answer)
                        moved = True
    return not all(player.done() for player in players)


def run_all(
    recorder: Recorder, schedule: str, sizes: tuple[int, ...], counts: Callable[[int], list[int]]
) -> tuple[int, list[str]]:
    """Returns the number of steps that a schedule ran, and which of them hang."""
    kind = find_schedule_kind(schedule)
    checked, found = 0, []
    for pp, vpp in product(sizes, filter(kind.supports, (1, 2))):
        layout = ParallelLayout(pp=pp, vpp=vpp, dp=1, stage_mapping=kind.stage_mapping)
        for count, train in product(counts(pp), (True, False)):
            try:
                check_micro_batches(schedule if train else "looped-bfs", pp, vpp, count)
            except LayoutError:
                continue
            records = [run(recorder, layout, rank, schedule, count, train) for rank in range(pp)]
            assert sum(isinstance(each, Started) for each in records[0]) >= count
            checked += 1
            if hangs(records):
                found.append(f"pp={pp} vpp={vpp} {count} micro-batches, {train=}")
    return checked, found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_step_hangs(recorder: Recorder, schedule: str) -> None:
    checked, found = run_all(recorder, schedule, (3,), lambda pp: [1, 2, 3, 4, 6])
    assert checked >= 6 and found == []


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "combined-1f1b"])
def test_no_step_in_groups_hangs(recorder: Recorder, schedule: str) -> None:
    layout = ParallelLayout(pp=3, vpp=2, dp=1)
    for count in (4, 7, 8, 11):
        records = [run(recorder, layout, rank, schedule, count, True, 4) for rank in range(3)]
        assert not hangs(records)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_step_of_many_hangs(recorder: Recorder, schedule: str) -> None:
    checked, found = run_all(recorder, schedule, (2, 3, 4, 5), lambda pp: list(range(1, 3 * pp)))
    assert checked >= 40 and found == []


def test_1f1b_of_fewer_micro_batches_than_stages_would_hang(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its own order, on the communicators of torch 2.13: this check detects it."""
    from megatron_parallel.pipeline import schedules

    class Unchecked(schedules.Schedule1F1B):
        def __init__(self, stage: Any, count: int, **options: Any) -> None:
            super().__init__(stage, max(count, stage.num_stages), **options)
            self._n_microbatches = count

    monkeypatch.setattr(schedules, "effective_schedule", lambda schedule, *_: schedule)
    monkeypatch.setitem(schedules._OF_ONE, "1f1b", Unchecked)
    monkeypatch.setattr("torch.distributed.pipelining.schedules._batch_p2p", as_torch_213)
    layout = ParallelLayout(pp=3, dp=1)
    stuck = [
        count
        for count in range(1, 5)
        if hangs([run(recorder, layout, rank, "1f1b", count, True) for rank in range(3)])
    ]
    assert stuck == [1, 2]


def as_torch_213(operations: list[dist.P2POp], desc: str | None = None) -> list[Any]:
    """Posts messages one by one if all are sends or all receives, like torch 2.13.

    Before 2.13 torch posts all of them in the same way.
    """
    if not operations:
        return []
    if len({each.op for each in operations}) > 1:
        return list(dist.batch_isend_irecv(operations))
    sends = operations[0].op == dist.isend
    return [
        dist.isend(each.tensor, group=each.group, tag=each.tag, group_dst=each.group_peer)
        if sends
        else dist.irecv(each.tensor, group=each.group, tag=each.tag, group_src=each.group_peer)
        for each in operations
    ]
