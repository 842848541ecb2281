"""Trains a layout with offloaded optimizer state on the simulated device, and on the CPU without.

    PYTHONPATH=tooling python -m layouts.offloaded TITLE

Prints for each rank the largest difference of any loss, norm, gradient and parameter, the share of
elements whose state is on the host, and how often the host waited for the optimizer in three steps.
"""

from simulated_device import NoGuardError, load_guard

try:
    load_guard()
except NoGuardError as error:
    print(f"DEVICE NOT SIMULATED: {error}")
    raise SystemExit(0) from None

import sys
from typing import Any, Final
from unittest.mock import patch

from device.ranks import _on_host, _trainer, largest_difference
from megatron_optim import OffloadConfig
from megatron_parallel import Mesh
from megatron_parallel.testing import Rank, WorkerPool
from megatron_train.prove.record import RecordingOptimizer, record_run
from simulated_device import simulated

from layouts import job
from layouts.case import Case
from layouts.cases import CASES
from layouts.models import SEQUENCE

STEPS: Final = 3
OFFLOAD: Final = OffloadConfig(
    optimizer_cpu_offload=True,
    optimizer_offload_fraction=0.6,
    overlap_cpu_optimizer_d2h_h2d=True,
)


class OffloadingOptimizer(RecordingOptimizer):
    """An optimizer with offloaded state that records its gradients."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, offload=OFFLOAD)


def compare(rank: Rank, case: Case) -> tuple[float, float, int]:
    """Returns difference, share and number of waits of one rank."""
    expected = record_run(_trainer(rank.mesh(case.layout), case, STEPS), SEQUENCE)
    layout, timeout = case.layout.resolve(rank.size), rank.collective_timeout
    with (
        simulated() as dispatch,
        Mesh.bind(layout, device="cuda", timeout=timeout) as mesh,
        patch.object(job, "RecordingOptimizer", OffloadingOptimizer),
    ):
        trainer = _trainer(mesh, case, STEPS)
        found = record_run(trainer, SEQUENCE)
        waits = sum(n for line, n in dispatch.waits.items() if "megatron_optim/decision" in line)
        main = trainer.optimizer.main
        hosted, every = (
            sum(t.numel() for t in each.values()) for each in (main.hosted, main.tensors)
        )
        return largest_difference(_on_host(found), expected), hosted / every, waits


def run(title: str) -> None:
    """Prints what each rank found."""
    case = next(case for case in CASES if case.title == title)
    preload = ("torch.distributed.tensor", "device.ranks")
    with WorkerPool(timeout=300, collective_timeout=60, preload=preload, device_guard=True) as pool:
        for difference, share, waits in pool.run(compare, case, ranks=case.layout.world_size):
            print(f"difference {difference:.3g}, offloaded {share:.3f}, waits {waits}")


if __name__ == "__main__":
    from layouts.offloaded import run as run_module  # workers import functions by module

    run_module(sys.argv[1])
