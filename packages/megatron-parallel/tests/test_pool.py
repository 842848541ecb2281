"""The worker pool: results, arguments, failures that name their rank, and recovery."""

import os
import random
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron_parallel.imagined import guard, guard_loaded
from megatron_parallel.testing import Rank, WorkerError, WorkerPool
from megatron_parallel.testing import pool as pool_module
from waiting import wait_until


@dataclass
class Report:
    rank: int
    total: float


def sum_over_ranks(rank: Rank, value: float) -> Report:
    total = torch.tensor(value * (rank.rank + 1), dtype=torch.float64)
    dist.all_reduce(total)
    return Report(rank.rank, total.item())


def raise_on(rank: Rank, culprit: int) -> None:
    if rank.rank == culprit:
        raise LookupError(f"planted in rank {culprit}")
    dist.barrier()


def exit_on(rank: Rank, culprit: int) -> None:
    if rank.rank == culprit:
        os._exit(7)
    dist.barrier()


def hang_on(rank: Rank, culprit: int) -> None:
    if rank.rank == culprit:
        time.sleep(600)
    dist.barrier()


def process_id(rank: Rank) -> int:
    return os.getpid()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_results_come_back_in_rank_order(worker_pool: WorkerPool, ranks: int) -> None:
    total = 1.5 * ranks * (ranks + 1) / 2
    assert worker_pool.run(sum_over_ranks, 1.5, ranks=ranks) == [
        Report(rank, total) for rank in range(ranks)
    ]


def test_closures_lambdas_and_partials_reach_the_ranks(worker_pool: WorkerPool) -> None:
    offset = 10
    assert worker_pool.run(lambda rank: rank.rank + offset) == [10, 11]
    assert worker_pool.run(partial(sum_over_ranks, value=2.0))[1] == Report(1, 6.0)


def test_tensors_are_sent_as_detached_copies(worker_pool: WorkerPool) -> None:
    tensors = {
        "bf16": torch.randn(3, 4).to(torch.bfloat16),
        "transposed": torch.arange(6).reshape(2, 3).T,
        "empty": torch.empty(0, 5, dtype=torch.float64),
        "scalar": torch.tensor(True),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "graph": torch.ones(2, requires_grad=True) * 3,
    }
    parameter = torch.nn.Parameter(torch.arange(3.0), requires_grad=False)
    for there, kept in worker_pool.run(lambda rank, *sent: sent, tensors, parameter):
        for name, tensor in tensors.items():
            assert not there[name].requires_grad
            torch.testing.assert_close(there[name], tensor.detach(), rtol=0, atol=0)
        assert isinstance(kept, torch.nn.Parameter) and not kept.requires_grad


def test_large_results_come_back(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(lambda rank: torch.full((1 << 20,), float(rank.rank)))
    assert [result.sum().item() for result in results] == [0.0, float(1 << 20)]


def test_every_call_starts_from_the_same_state(
    worker_pool: WorkerPool, tmp_path, monkeypatch
) -> None:
    def draw(rank: Rank):
        state = torch.rand(1).item(), random.random(), np.random.rand()
        state = *state, torch.is_grad_enabled(), torch.get_default_dtype(), str(Path.cwd())
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        return *state, torch.get_num_threads()

    monkeypatch.chdir(tmp_path)
    first = worker_pool.run(draw)
    assert first[0] == first[1] == worker_pool.run(draw)[0]
    assert first[0][3:] == (True, torch.float32, str(tmp_path), 1)


def test_a_rank_that_raises_is_named_with_its_traceback(worker_pool: WorkerPool) -> None:
    with pytest.raises(WorkerError) as caught:
        worker_pool.run(raise_on, 1)
    message = str(caught.value)
    assert message.startswith("rank 1 of 2 raised LookupError: planted in rank 1\n")
    assert f'File "{__file__}"' in message and "in raise_on" in message
    assert "in _answer" not in message
    assert caught.value.failures[0].rank == 1 and caught.value.failures[0].kind == "raised"


def test_a_rank_that_dies_is_named_with_its_status(worker_pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"^rank 0 of 2 exited with status 7"):
        worker_pool.run(exit_on, 0)
    with pytest.raises(WorkerError, match=r"^rank 1 of 2 died of signal 9 \(SIGKILL\)"):
        worker_pool.run(lambda rank: rank.rank and os.kill(os.getpid(), signal.SIGKILL))


def test_a_rank_that_crashes_is_shown_where_it_was(worker_pool: WorkerPool) -> None:
    def crash(rank: Rank) -> None:
        os.kill(os.getpid(), signal.SIGABRT)

    with pytest.raises(WorkerError, match=r"(?s)^rank 0 of 1 died of signal 6 .* in crash"):
        worker_pool.run(crash, ranks=1)


def test_an_interrupt_at_the_terminal_reaches_no_rank(worker_pool: WorkerPool) -> None:
    def session(rank: Rank) -> tuple[int, bool]:
        return os.getsid(0), signal.getsignal(signal.SIGINT) == signal.SIG_IGN

    ((found, ignored),) = worker_pool.run(session, ranks=1)
    assert found != os.getsid(0) and ignored


def test_a_rank_that_hangs_is_shown_where_it_was(worker_pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="did not finish within 1 s") as caught:
        worker_pool.run(hang_on, 1, timeout=1)  # the rank would sleep for ten minutes
    hung = {failure.rank: failure for failure in caught.value.failures}
    assert "in hang_on" in hung[1].traceback and "in barrier" in hung[0].traceback


def test_the_workers_of_the_last_three_numbers_of_ranks_wait_for_calls() -> None:
    def pid(rank: Rank) -> int:
        return os.getpid()

    with WorkerPool(4) as pool:
        one, two, three = (pool.run(pid, ranks=ranks) for ranks in (1, 2, 3))
        assert pool.run(pid, ranks=1) == one
        pool.run(pid, ranks=4)
        assert pool.run(pid, ranks=3) == three and pool.run(pid, ranks=1) == one
        last = pool.run(pid, ranks=2)
        assert not set(last) & set(two)
        os.kill(pool._server.pid, signal.SIGKILL)  # the workers end with it
        wait_until(lambda: not any(map(is_running, last)))


def test_collectives_have_more_time_in_calls_with_more_time(worker_pool: WorkerPool) -> None:
    def seconds(rank: Rank) -> float:
        return rank.collective_timeout.total_seconds()

    usual = worker_pool.run(seconds, ranks=1)[0]
    assert worker_pool.run(seconds, ranks=1, timeout=4 * worker_pool.timeout) == [4 * usual]
    assert worker_pool.run(seconds, ranks=1, timeout=worker_pool.timeout / 4) == [usual]


def test_unfinished_collectives_fail_the_call_that_started_them(worker_pool: WorkerPool) -> None:
    def unmatched(rank: Rank) -> None:
        if rank.rank == 0:
            dist.all_reduce(torch.ones(3), async_op=True)

    with pytest.raises(WorkerError):
        worker_pool.run(unmatched, timeout=2)


def test_a_result_that_does_not_pickle_is_named(worker_pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="rank 0 of 1 raised TypeError: cannot pickle"):
        worker_pool.run(lambda rank: threading.Lock(), ranks=1)


def test_the_pool_recovers_with_fresh_workers(worker_pool: WorkerPool) -> None:
    before = worker_pool.run(process_id)
    assert worker_pool.run(process_id) == before
    with pytest.raises(WorkerError):
        worker_pool.run(exit_on, 1)
    after = worker_pool.run(process_id)
    assert not set(before) & set(after)
    assert worker_pool.run(sum_over_ranks, 1.0)[0].total == 3.0


def test_a_worker_lost_between_calls_is_replaced_with_a_warning(worker_pool: WorkerPool) -> None:
    killed = worker_pool.run(process_id)[1]
    connection = worker_pool._worker_sets[2][1]
    os.kill(killed, signal.SIGKILL)
    select.select([connection], [], [], 60)  # until all of its threads have ended
    with pytest.warns(UserWarning, match="rank 1 died of signal 9") as warned:
        assert worker_pool.run(sum_over_ranks, 1.0)[0].total == 3.0
    assert warned[0].filename == __file__


def test_a_call_is_one_message_to_each_worker_and_one_back(
    worker_pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process is started, the fork server gets no request, and no group is created."""
    processes = worker_pool.run(process_id)
    received: list[str] = []

    def count(name: str) -> None:
        true = getattr(pool_module.wire, name)

        def counted(*arguments: Any) -> Any:
            received.append(name)
            return true(*arguments)

        monkeypatch.setattr(pool_module.wire, name, counted)

    count("send")
    count("receive")
    monkeypatch.setattr(worker_pool, "_ask", None)
    monkeypatch.setattr(worker_pool, "_start_workers", None)
    for _ in range(3):
        assert worker_pool.run(process_id) == processes
    assert received == 3 * ["send", "send", "receive", "receive"]


@pytest.mark.parametrize("ranks", [0, 9])
def test_a_number_of_ranks_out_of_range_is_refused(worker_pool: WorkerPool, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"ranks is {ranks}; this pool has 1 to 8"):
        worker_pool.run(process_id, ranks=ranks)


PARENT = """
import os, signal, threading, time
from megatron_parallel.testing import WorkerPool
pool = WorkerPool(2)
print(pool._server.pid, *pool.run(lambda rank: os.getpid()), pool._directory, flush=True)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
pool.run(lambda rank: time.sleep(600))
"""


def test_busy_workers_end_with_a_killed_parent(tmp_path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, timeout=120, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    *pids, folder = ended.stdout.split()
    directory = Path(folder)
    left = [int(pid) for pid in pids]
    deadline = time.monotonic() + 60
    while (left or directory.exists()) and time.monotonic() < deadline:
        left = [pid for pid in left if is_running(pid)]
        time.sleep(0.05)
    assert len(pids) == 3 and not left and not directory.exists()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return not state.stdout.strip().startswith("Z") and bool(state.stdout.strip())


SHAPES = """
from jaxtyping import Float
from torch import Tensor

def double(x: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    return 2 * x
"""


def test_shape_annotations_are_checked_inside_ranks(tmp_path, monkeypatch) -> None:
    (tmp_path / "annotated").mkdir()
    (tmp_path / "annotated" / "__init__.py").write_text("")
    (tmp_path / "annotated" / "shapes.py").write_text(SHAPES)
    monkeypatch.syspath_prepend(str(tmp_path))

    def call(rank: Rank, *shape: int) -> torch.Size:
        from annotated.shapes import double

        return double(torch.ones(*shape)).shape

    with WorkerPool(2, typecheck=["annotated"]) as pool:
        assert pool.run(call, 2, 3) == [(2, 3), (2, 3)]
        with pytest.raises(WorkerError, match=r"(?s)TypeCheckError.*double"):
            pool.run(call, 2, 3, 4)
    with pytest.raises(ValueError, match="this pool is closed"):
        pool.run(call, 2, 3)


def test_annotations_are_checked_after_a_pool_that_did_not(tmp_path, monkeypatch) -> None:
    (tmp_path / "importer.py").write_text("import shapes\n")
    (tmp_path / "shapes.py").write_text(SHAPES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "")

    def call(rank: Rank) -> torch.Size:
        import importer

        return importer.shapes.double(torch.ones(2, 3, 4)).shape

    with WorkerPool(2, typecheck=["importer"]) as pool:
        assert pool.run(call) == [(2, 3, 4)] * 2
    assert list(tmp_path.glob("__pycache__/shapes*jaxtyping*"))
    with (
        WorkerPool(2, typecheck=["importer", "shapes"]) as pool,
        pytest.raises(WorkerError, match=r"(?s)TypeCheckError.*double"),
    ):
        pool.run(call)


def test_workers_load_the_device_guard_if_asked(worker_pool: WorkerPool) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")  # torch has a guard for it, and ours is not built
    if not any(map(shutil.which, guard.COMPILERS)):
        pytest.skip("there is no C++ compiler")  # the guard cannot be built

    def call(rank: Rank) -> bool:
        return guard_loaded()

    with WorkerPool(2, device_guard=True) as pool:
        assert pool.run(call) == [True, True]
    assert worker_pool.run(call) == [False, False]


def test_functions_of_packages_need_no_cloudpickle(tmp_path: Path) -> None:
    (tmp_path / "cloudpickle.py").write_text(
        "raise ModuleNotFoundError('blocked', name='cloudpickle')\n"
    )
    program = """
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.testing import WorkerPool
with WorkerPool(2) as pool:
    print(pool.run_mesh(ParallelLayout(dp=2), Mesh.has_axis, "tp"))
    try:
        pool.run(lambda rank: rank.rank)
    except ModuleNotFoundError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found, error = done.stdout.splitlines()
    assert found == "[True, True]"
    assert "cloudpickle; pip install 'megatron-parallel[testing]'" in error
