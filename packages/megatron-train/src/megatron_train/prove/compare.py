"""Compares what the ranks of a layout recorded with one rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from megatron_train.prove.record import Outcome, Piece

LIMIT: Final = 1e-9
"""In float64: of loss, norm and parameters absolute, of gradients relative to their size."""

Boxes = Mapping[str, Sequence[tuple[int, tuple[int, ...], Tensor]]]
"""Boxes of each tensor: the rank, the box's offsets and values."""


@dataclass(frozen=True)
class Differences:
    """Largest differences between a layout and one rank, over all ranks and steps.

    Attributes:
        loss: Of any step.
        norm: Of the gradient of any step.
        gradient: Of any parameter in a recorded step, relative to the largest element of that
            gradient, or to a thousandth of the rms of all gradients if that is larger.
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
class Deviation:
    """The first value of a layout that is not that of one rank.

    Attributes:
        step: Number of the step, from 1.
        what: `gradient`, `loss`, `norm` or `parameter`.
        name: Name of the parameter; empty for a loss or norm.
        size: The difference.
        ranks: Ranks with the difference.
        others: Number of other parameters that differ in the same step.
    """

    step: int
    what: str
    name: str
    size: float
    ranks: tuple[int, ...]
    others: int = 0


def compare(ranks: Sequence[Outcome], whole: Outcome, *, experts: bool) -> Differences:
    """Returns the differences between the ranks of a layout and one rank.

    Args:
        ranks: What each rank recorded.
        whole: What one rank recorded.
        experts: Whether the model has experts.
    """
    steps = range(len(whole.gradients))
    return Differences(
        loss=largest(ranks, whole, "losses"),
        norm=largest(ranks, whole, "norms"),
        gradient=max(
            relative(joined([r.gradients[i] for r in ranks]), dict_of(whole.gradients[i]))
            for i in steps
        ),
        parameter=absolute(joined([r.parameters for r in ranks]), dict_of(whole.parameters)),
        rerouted=rerouted(ranks, whole) if experts else None,
    )


def first_deviation(ranks: Sequence[Outcome], whole: Outcome) -> Deviation | None:
    """Returns the first difference above `LIMIT`; None if there is none.

    Gradients of every step must be recorded. Of the gradients of a step, that with the largest
    difference is returned.
    """
    per_step = len(whole.losses) // len(whole.norms)
    for step, gradients in enumerate(whole.gradients):
        for what, name, numbers in (
            ("loss", "losses", range(step * per_step, (step + 1) * per_step)),
            ("norm", "norms", range(step, step + 1)),
        ):
            if what == "norm":  # gradients say more
                found = _first_of(
                    step + 1,
                    "gradient",
                    joined([r.gradients[step] for r in ranks]),
                    dict_of(gradients),
                    _sizes(dict_of(gradients)),
                )
                if found is not None:
                    return found
            own = [
                max(_distance(getattr(r, name)[i], getattr(whole, name)[i]) for i in numbers)
                for r in ranks
            ]
            if wrong := tuple(rank for rank, size in enumerate(own) if not size <= LIMIT):
                return Deviation(step + 1, what, "", max(own), wrong)
    parts = joined([r.parameters for r in ranks])
    return _first_of(len(whole.norms), "parameter", parts, dict_of(whole.parameters), {})


def _distance(ours: float, other: float) -> float:
    size = abs(ours - other)
    return size if size == size else torch.inf


def _first_of(
    step: int, what: str, ours: Boxes, whole: Mapping[str, Tensor], sizes: Mapping[str, float]
) -> Deviation | None:
    """Returns the largest difference of a step above `LIMIT`, or None."""
    found = {name: value / sizes.get(name, 1.0) for name, value in deviations(ours, whole).items()}
    wrong = {name: value for name, value in found.items() if not value <= LIMIT}
    if not wrong:
        return None
    name = max(wrong, key=wrong.__getitem__)
    limit = LIMIT * sizes.get(name, 1.0)
    ranks = {
        rank
        for rank, offsets, values in ours.get(name, ())
        if not _box_difference(whole[name], offsets, values) <= limit
    }
    return Deviation(step, what, name, wrong[name], tuple(sorted(ranks)), len(wrong) - 1)


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


def joined(
    ranks: Sequence[Sequence[Piece]],
) -> dict[str, list[tuple[int, tuple[int, ...], Tensor]]]:
    """Returns all boxes of each tensor with their rank; copies stay separate."""
    found: dict[str, list[tuple[int, tuple[int, ...], Tensor]]] = {}
    for rank, own in enumerate(ranks):
        for name, offsets, values in own:
            found.setdefault(name, []).append((rank, offsets, values))
    return found


def dict_of(parts: Sequence[Piece]) -> dict[str, Tensor]:
    """Returns the tensors of one rank that holds all of them whole."""
    return {name: values for name, _, values in parts}


def absolute(ours: Boxes, whole: Mapping[str, Tensor]) -> float:
    """Returns the largest difference of any element of any copy."""
    return max(deviations(ours, whole).values())


def relative(ours: Boxes, whole: Mapping[str, Tensor]) -> float:
    """Returns the largest difference of any tensor, relative to its largest element."""
    sizes = _sizes(whole)
    return max(value / sizes[name] for name, value in deviations(ours, whole).items())


def _sizes(whole: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the largest element of each tensor, or a thousandth of the rms of all.

    Returns 1 for each if all are 0, as in a step whose samples have no loss.
    """
    flat = torch.cat([tensor.flatten() for tensor in whole.values()])
    floor = 1e-3 * float(flat.square().mean().sqrt()) or 1.0
    return {name: max(float(tensor.abs().max()), floor) for name, tensor in whole.items()}


def deviations(ours: Boxes, whole: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the largest difference of each tensor; infinite if a part of it is on no rank."""
    result = {}
    for name, tensor in whole.items():
        held = torch.zeros(tensor.shape, dtype=torch.bool)
        worst = 0.0
        for _, offsets, values in ours.get(name, ()):
            held[_box(offsets, values)] = True
            worst = max(worst, _box_difference(tensor, offsets, values))
        result[name] = worst if bool(held.all()) else torch.inf
    if unknown := ours.keys() - whole.keys():
        raise ValueError(f"{min(unknown)!r} is not on one rank: names depend on the layout")
    return result


def _box(offsets: tuple[int, ...], values: Tensor) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))


def _box_difference(whole: Tensor, offsets: tuple[int, ...], values: Tensor) -> float:
    """Returns the largest difference in a box; infinite if a value is NaN."""
    return _distance(float((values - whole[_box(offsets, values)]).abs().max()), 0.0)
