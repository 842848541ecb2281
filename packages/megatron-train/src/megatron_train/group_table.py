"""The table of parameter groups that a run prints: rule, learning rate and weight decay of each."""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from megatron_ckpt import Coordinator, map_reduce
from megatron_optim import Optimizer
from megatron_parallel import Sharding

_HEAD = ("rule", "learning rate", "weight decay", "tensors", "parameters")


class _Row(NamedTuple):
    """What the parameters of a row have in common.

    Attributes:
        rule: Name of the update rule.
        lr: Factor of the learning rate, in words.
        decay: Factor of the weight decay, in words.
    """

    rule: str
    lr: str
    decay: str


def group_table(
    optimizer: Optimizer, table: Mapping[str, Sharding], coordinator: Coordinator
) -> list[str]:
    """Returns the lines of a table of the parameter groups of all ranks, those that decay first.

    Every parameter counts once, with its global size. All ranks call it together.

    Args:
        optimizer: Optimizer of this rank.
        table: Sharding of each of its parameters.
        coordinator: The ranks of the run.
    """

    def own() -> list[Any]:
        groups = [(_row(optimizer, group), group.names) for group in optimizer.groups]
        return [
            [[*row], {name: prod(table[name].shape) for name in names}] for row, names in groups
        ]

    def merged(ranks: list[list[Any]]) -> list[str]:
        rows: dict[_Row, dict[str, int]] = {}
        for row, sizes in (group for groups in ranks for group in groups):
            rows.setdefault(_Row(*row), {}).update(sizes)
        return list(_lines(rows))

    lines: list[str] = map_reduce(coordinator, own, merged)
    return lines


def _row(optimizer: Optimizer, group: Any) -> _Row:
    own_rate = group.decoupled and optimizer.config.decoupled_lr is not None
    factor = group.lr_mult if own_rate else group.lr_mult * group.lr_factor
    return _Row(
        type(group.rule).__name__,
        f"{factor:g} x {'--decoupled-lr' if own_rate else '--lr'}",
        f"{group.decay_factor:g} x --weight-decay" if group.decay_factor else "none",
    )


def _lines(rows: Mapping[_Row, Mapping[str, int]]) -> Iterator[str]:
    cells = [_HEAD] + [
        (*row, f"{len(sizes):,}", f"{sum(sizes.values()):,}") for row, sizes in rows.items()
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_HEAD))]
    yield "parameter groups:"
    for row in cells:
        words = [text.ljust(width) for text, width in zip(row[:3], widths[:3], strict=True)]
        numbers = [text.rjust(width) for text, width in zip(row[3:], widths[3:], strict=True)]
        yield f"  {'  '.join([*words, *numbers])}"
