"""Order of work on side streams, which a recorder stands in for."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron_parallel import (
    DataParallelConfig,
    GradientBuffers,
    Mesh,
    ParallelLayout,
    Sharding,
)
from megatron_parallel.collectives.async_collective import AsyncCollective
from megatron_parallel.data_parallel import bucket
from megatron_parallel.recompute import OffloadSavedTensors, saved_tensors
from megatron_parallel.side_stream import SideStream
from megatron_parallel.testing import WorkerPool
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = "abc"


class Recorder:
    """Records what is queued on side streams and on the stream that computes."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.streams = 0
        self.current = ""

    def of(self, device: torch.device) -> "Stream":
        self.streams += 1
        return Stream(self, str(self.streams))

    def note(self, what: str) -> None:
        self.order.append(f"{self.current}{what}")


class Stream(SideStream):
    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    @contextmanager
    def running(self) -> Iterator[None]:
        self.recorder.current = f"{self.name}: "
        yield
        self.recorder.current = ""

    def join(self) -> None:
        self.recorder.note(f"join {self.name}")

    def uses(self, t: Tensor) -> None:
        self.recorder.note(f"uses {t.numel()}")

    def mark(self) -> Any:
        self.recorder.note("mark")
        return len(self.recorder.order)

    def hand_over(self, t: Tensor, mark: Any) -> None:
        assert self.recorder.order[mark - 1] == "mark"
        self.recorder.note(f"hand over {t.numel()}")


def summed(mesh: Mesh, config: DataParallelConfig, tied: str | None) -> list[Tensor]:
    """Returns the gradients after a step in which they depend on the rank."""
    weights = {name: nn.Parameter(torch.zeros(128, dtype=torch.bfloat16)) for name in NAMES}
    table = {name: Sharding((128,)) for name in NAMES}
    if tied is not None:
        table["b"] = Sharding((128,), tied=tied)
    buffers = GradientBuffers(weights, table, mesh, config)
    buffers.begin(last=True)
    own = torch.arange(128.0) + 10**mesh.rank
    sum((weights[name] * own).sum() for name in NAMES).backward()
    buffers.finish()
    return [g.clone() for g in buffers.gradients().values()]


CASES: dict[str, tuple[ParallelLayout, dict[str, bool], str | None, list[str]]] = {
    "near and far ranks": (
        ParallelLayout(dp=4, dp_outer=2),
        {},
        None,
        ["reduce_scatter", "all_reduce", "all_gather"],
    ),
    "near and far ranks, sharded": (
        ParallelLayout(dp=4, dp_outer=2),
        {"use_distributed_optimizer": True},
        None,
        ["reduce_scatter", "all_reduce"],
    ),
    "bf16": (
        ParallelLayout(dp=4),
        {
            "ddp_reduce_scatter_with_fp32_accumulation": True,
            "accumulate_allreduce_grads_in_fp32": False,
        },
        None,
        ["all_to_all", "all_gather"],
    ),
    "one collective": (ParallelLayout(dp=4), {}, None, ["all_reduce"]),
    "tied": (ParallelLayout(dp=2, pp=2), {}, "embedding", ["all_reduce"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_reduction_is_queued_as_a_whole_and_joined_at_the_end(
    worker_pool: WorkerPool, name: str
) -> None:
    layout, settings, tied, collectives = CASES[name]

    def run(mesh: Mesh) -> tuple[bool, list[str]]:
        config = DataParallelConfig(ddp_bucket_size=1, overlap_grad_reduce=True, **settings)
        truth = summed(mesh, config, tied)
        recorder = Recorder()
        start, wait = AsyncCollective.__init__, AsyncCollective.wait_on_stream

        def starting(self: AsyncCollective, axis: Any, operation: str, *rest: Any, **more: Any):
            recorder.note(f"start {operation.split(maxsplit=1)[0]}")
            start(self, axis, operation, *rest, **more)

        def waiting(self: AsyncCollective) -> None:
            recorder.note(f"wait for {self.operation.split()[0]}")
            wait(self)

        with (
            patch.object(bucket, "SideStream", recorder),
            patch.object(AsyncCollective, "__init__", starting),
            patch.object(AsyncCollective, "wait_on_stream", waiting),
        ):
            found = summed(mesh, config, tied)
        return all(map(torch.equal, found, truth)), recorder.order

    steps = [line for each in collectives for line in (f"start {each}", f"wait for {each}")]
    queued = [f"{stream}: {step}" for stream in (1, 2, 3) for step in steps]
    joined = [f"join {stream}" for stream in (1, 2, 3)]
    if tied:  # the one tied bucket is summed once more, after the sums of its data ranks
        number = "2"
        more = [f"{number}: {step}" for step in steps]
        joined += [*more, f"join {number}"]
    for equal, order in worker_pool.run_mesh(layout, run):
        assert equal
        assert order == [*queued, *joined]


class Copies(TorchDispatchMode):
    """Records copies between tensors."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.recorder.note(f"offload {args[0].numel()}")
        if func is torch.ops.aten._to_copy.default:
            self.recorder.note(f"reload {args[0].numel()}")
        if func is torch.ops.aten.cos.default:
            self.recorder.note(f"cos {args[0].numel()}")
        return func(*args, **(kwargs or {}))


def test_offloaded_activations_return_while_the_block_after_them_runs_backward() -> None:
    """Each block is a sine, whose backward pass is a product with the cosine of its input."""

    def train(steps: bool) -> tuple[Tensor, list[str]]:
        recorder = Recorder()
        x = torch.arange(6.0, dtype=torch.float64).requires_grad_()
        with patch.object(saved_tensors, "SideStream", recorder), Copies(recorder):
            host = OffloadSavedTensors()
            y = x
            for length in (6, 5, 4) if steps else ():
                with host.enabled():
                    y = y[:length].sin()
            if not steps:
                y = x[:6].sin()[:5].sin()[:4].sin()
            y.sum().backward()
        assert x.grad is not None
        return x.grad, recorder.order

    gradient, order = train(True)
    truth, _ = train(False)
    assert torch.equal(gradient, truth)
    forward = [line for n in (6, 6, 5) for line in (f"1: offload {n}", f"uses {n}")]
    assert order == [
        *forward,  # whole storages: a sine saves a view of what is before it
        *("1: reload 5", "mark", "1: reload 6", "mark", "hand over 5", "cos 4"),
        *("1: reload 6", "mark", "hand over 6", "cos 5", "hand over 6", "cos 6"),
    ]


def test_a_side_stream_waits_for_the_current_one_and_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    class Queued:
        """A stream of a device that does not exist."""

        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: "Queued") -> None:
            order.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: str) -> None:
            order.append(f"{self.name} waits for {event}")

        def record_event(self) -> str:
            return f"mark of {self.name}"

    current = Queued("current")

    @contextmanager
    def stream(inner: Queued) -> Iterator[None]:
        order.append(f"on {inner.name}")
        yield
        order.append(f"off {inner.name}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Queued(f"side of {device}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda t, used: order.append(f"{used.name} uses {len(t)}")
    )
    assert SideStream.of(torch.device("cpu")) is None
    side = SideStream.of(torch.device("cuda:1"))
    assert side is not None
    with side.running():
        order.append("work")
        side.uses(torch.ones(3))
        mark = side.mark()
    side.hand_over(torch.ones(5), mark)
    side.join()
    name = "side of cuda:1"
    assert order == [
        *(f"{name} waits for current", f"on {name}", "work", f"{name} uses 3", f"off {name}"),
        *(f"current waits for mark of {name}", "current uses 5", f"current waits for {name}"),
    ]


@pytest.mark.gpu
def test_offloading_does_not_wait_for_the_device(
    device: torch.device, device_waits: Callable[[], AbstractContextManager[Counter[str]]]
) -> None:
    gradients = []
    with device_waits() as waits:
        for host in (None, OffloadSavedTensors()):
            x = torch.arange(64, dtype=torch.float32, device=device).view(8, 8).requires_grad_()
            y = x
            for _ in range(3):
                with nullcontext() if host is None else host.enabled():
                    y = (y @ y).softmax(1).t()
            y[0].sum().backward()
            gradients.append(x.grad)
        assert host is not None and host.offloaded == host.reloaded > 0
    assert waits == Counter()
    assert torch.equal(*(g.cpu() for g in gradients))
