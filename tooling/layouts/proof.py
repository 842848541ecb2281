"""Compares two trainings by numbers; they are equal if every difference is at most `LIMIT`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from megatron_parallel import Mesh
from megatron_parallel.testing import WorkerPool
from torch import Tensor

from layouts.cases import Case
from layouts.defects import planted
from layouts.job import Outcome, Piece, train

LIMIT = 1e-9
"""In float64: of loss, norm and parameters absolute, of gradients relative to their size."""

LOSS_LIMIT, NORM_LIMIT = 1e-5, 1e-6
"""In float32: loss of ten steps, relative norm of the first."""

STEPS, LEARNING_RATE = 20, 3e-3
STEPS_FP32, LEARNING_RATE_FP32 = 10, 3e-4


@dataclass(frozen=True)
class Differences:
    """Largest differences between a layout and one rank, over all ranks and steps.

    Attributes:
        loss: Of any step.
        norm: Of the gradient of any step.
        gradient: Of any parameter in the first or last step, relative to the largest element of
            that gradient, or to a thousandth of the rms of all gradients if that is larger.
        parameter: After the last step.
        rerouted: Number of tokens of any layer and step that were sent to other experts; None
            without experts.
    """

    loss: float
    norm: float
    gradient: float
    parameter: float
    rerouted: int | None = None

    @property
    def equal(self) -> bool:
        """Whether all are at most `LIMIT` (NaN is not) and no token was rerouted."""
        numbers = (self.loss, self.norm, self.gradient, self.parameter)
        return all(x <= LIMIT for x in numbers) and not self.rerouted


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
    return Differences(
        loss=largest(ranks, whole, "losses"),
        norm=largest(ranks, whole, "norms"),
        gradient=max(
            relative(joined([rank.gradients[i] for rank in ranks]), dict_of(whole.gradients[i]))
            for i in (0, 1)
        ),
        parameter=absolute(joined([r.parameters for r in ranks]), dict_of(whole.parameters)),
        rerouted=rerouted(ranks, whole) if case.config.expert_parallel else None,
    )


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


def largest(ranks: Sequence[Outcome], whole: Outcome, name: str) -> float:
    """Returns the largest difference of a number that every rank has for every step."""
    ours = torch.tensor([getattr(rank, name) for rank in ranks], dtype=torch.float64)
    return float((ours - torch.tensor(getattr(whole, name), dtype=torch.float64)).abs().max())


def rerouted(ranks: Sequence[Outcome], whole: Outcome) -> int:
    """Returns the number of tokens with other experts than on one rank.

    Counts the tokens of all layers and micro-batches.
    """
    parts = {key: experts for rank in ranks for key, experts in rank.routes.items()}
    count = 0
    for (layer, number, _), expected in whole.routes.items():
        keys = sorted(key for key in parts if key[:2] == (layer, number))
        found = torch.cat([parts[key] for key in keys]) if keys else expected.new_empty(0)
        same = found.shape == expected.shape
        count += int((found != expected).any(1).sum()) if same else len(expected)
    return count


def joined(ranks: Sequence[Sequence[Piece]]) -> dict[str, list[tuple[tuple[int, ...], Tensor]]]:
    """Returns all boxes of each tensor, from all ranks; copies stay separate."""
    found: dict[str, list[tuple[tuple[int, ...], Tensor]]] = {}
    for rank in ranks:
        for name, offsets, values in rank:
            found.setdefault(name, []).append((offsets, values))
    return found


def dict_of(parts: Sequence[Piece]) -> dict[str, Tensor]:
    """Returns the tensors of one rank that holds all of them whole."""
    return {name: values for name, _, values in parts}


def absolute(
    ours: dict[str, list[tuple[tuple[int, ...], Tensor]]], whole: dict[str, Tensor]
) -> float:
    """Returns the largest difference of any element of any copy."""
    return max(deviations(ours, whole).values())


def relative(
    ours: dict[str, list[tuple[tuple[int, ...], Tensor]]], whole: dict[str, Tensor]
) -> float:
    """Returns the largest difference of any tensor, relative to its largest element."""
    flat = torch.cat([tensor.flatten() for tensor in whole.values()])
    floor = 1e-3 * float(flat.square().mean().sqrt())
    sizes = {name: max(float(tensor.abs().max()), floor) for name, tensor in whole.items()}
    return max(value / sizes[name] for name, value in deviations(ours, whole).items())


def deviations(
    ours: dict[str, list[tuple[tuple[int, ...], Tensor]]], whole: dict[str, Tensor]
) -> dict[str, float]:
    """Returns the largest difference of each tensor; infinite if a part of it is on no rank."""
    result = {}
    for name, tensor in whole.items():
        held = torch.zeros(tensor.shape, dtype=torch.bool)
        worst = 0.0
        for offsets, values in ours.get(name, []):
            box = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
            held[box] = True
            difference = float((values - tensor[box]).abs().max())
            worst = max(worst, difference) if difference == difference else torch.inf
        result[name] = worst if bool(held.all()) else torch.inf
    if unknown := ours.keys() - whole.keys():
        raise ValueError(f"{min(unknown)!r} is not on one rank: names depend on the layout")
    return result
