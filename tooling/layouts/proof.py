"""Compares two trainings by numbers; they are equal if every difference is at most `LIMIT`."""

from dataclasses import dataclass
from functools import cache

import torch
from megatron_parallel import Mesh
from megatron_parallel.testing import WorkerPool
from megatron_train.prove.compare import Differences, compare, largest
from megatron_train.prove.record import Outcome

from layouts.case import Case
from layouts.defects import planted
from layouts.job import train

LOSS_LIMIT, NORM_LIMIT = 1e-5, 1e-6
"""In float32: loss of ten steps, relative norm of the first."""

STEPS, LEARNING_RATE = 20, 3e-3
STEPS_FP32, LEARNING_RATE_FP32 = 10, 3e-4


@dataclass(frozen=True)
class DifferencesFp32:
    """Differences in float32: of the loss over ten steps, of the relative norm in the first."""

    loss: float
    norm: float

    @property
    def equal(self) -> bool:
        """Whether both are within their limits."""
        return self.loss <= LOSS_LIMIT and self.norm <= NORM_LIMIT


def prove(
    pool: WorkerPool, case: Case, *, defect: str | None = None, steps: int = STEPS
) -> Differences:
    """Trains `case` in its layout, with a planted defect if any; compares it with one rank."""
    whole = reference(case.reference, steps, torch.float64, LEARNING_RATE)
    ranks = pool.run_mesh(
        case.layout, _train, case, defect, steps, torch.float64, LEARNING_RATE, timeout=300
    )
    return compare(ranks, whole, experts=case.config.expert_parallel)


def prove_fp32(pool: WorkerPool, case: Case) -> DifferencesFp32:
    """Returns the differences in float32 over ten steps at a low learning rate."""
    arguments = (STEPS_FP32, torch.float32, LEARNING_RATE_FP32)
    whole = reference(case.reference, *arguments)
    ranks = pool.run_mesh(case.layout, _train, case, None, *arguments, timeout=300)
    norm = max(abs(rank.norms[0] - whole.norms[0]) for rank in ranks) / whole.norms[0]
    return DifferencesFp32(largest(ranks, whole, "losses"), norm)


@cache
def reference(case: Case, steps: int, dtype: torch.dtype, learning_rate: float) -> Outcome:
    """Returns the training on one rank, in this process."""
    return train(Mesh.single(), case, steps, dtype, learning_rate)


def _train(
    mesh: Mesh, case: Case, defect: str | None, steps: int, dtype: torch.dtype, rate: float
) -> Outcome:
    with planted(defect, mesh):
        return train(mesh, case, steps, dtype, rate)
