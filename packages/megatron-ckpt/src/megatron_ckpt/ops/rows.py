"""Rows as data: checked, with the fields of a model configuration, expanded for its layers."""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_ckpt.errors import CheckpointError, did_you_mean
from megatron_ckpt.ops.definitions import OPS
from megatron_ckpt.ops.layers import LAYER, resolve_int, select_layers
from megatron_ckpt.ops.op import Op, ReadBox
from megatron_ckpt.views import Box

if TYPE_CHECKING:
    from torch import Tensor

_MOST_NAMES = 2_000_000  # tensors of a model; the largest published models have about 50,000

Step = tuple[str, Mapping[str, Any]]
Names = str | Sequence[str]
RowData = (
    tuple[Names, Sequence[str], Sequence[Step]]
    | tuple[Names, Sequence[str], Sequence[Step], Mapping[str, Any]]
)
"""Our name or names, theirs, the operations from theirs to ours, layers; see ``schema.json``."""


@dataclasses.dataclass(frozen=True)
class Row:
    """The tensors of ours in one layer and the tensors of theirs that they are made from."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    ops: tuple[Op, ...]

    def forward(self, tensors: Sequence["Tensor"]) -> list["Tensor"]:
        """Converts their tensors to ours."""
        held = list(tensors)
        for op in self.ops:
            held = self._run(op, lambda op=op, held=held: op.forward(held), held)
        return held

    def inverse(self, tensors: Sequence["Tensor"]) -> list["Tensor"]:
        """Converts our tensors to theirs."""
        counts = [len(self.theirs)]
        for op in self.ops:
            counts.append(op.num_outputs(counts[-1]))
        held = list(tensors)
        for op, count in zip(reversed(self.ops), reversed(counts[:-1]), strict=True):
            held = self._run(op, lambda op=op, n=count, held=held: op.inverse(held, n), held)
        return held

    def read_box(self, name: str, box: Box, meta: Sequence["Tensor"], get: ReadBox) -> "Tensor":
        """Returns a box of one of our tensors from the boxes of theirs that it needs.

        Args:
            name: The name of our tensor.
            box: The box of that tensor.
            meta: Their tensors on the meta device.
            get: Called with the index of a tensor of theirs and the box of it that is needed.
        """
        stages = [list(meta)]
        for op in self.ops:
            stages.append(op.forward(stages[-1]))
        for op, inputs in zip(self.ops, stages[:-1], strict=True):
            shapes = [tuple(tensor.shape) for tensor in inputs]
            get = _reader(op, shapes, get)
        try:
            return get(self.ours.index(name), box)
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(
                f"{' + '.join(self.theirs)} <-> {' + '.join(self.ours)}: {error}"
            ) from error

    def _run(self, op: Op, call: Any, held: Sequence["Tensor"]) -> list["Tensor"]:
        try:
            result: list[Tensor] = call()
        except (ValueError, IndexError, RuntimeError) as error:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in held)
            raise CheckpointError(
                f"{' + '.join(self.theirs)} <-> {' + '.join(self.ours)}: {op} does not fit "
                f"{shapes}: {error}"
            ) from error
        return result


def _reader(op: Op, shapes: Sequence[tuple[int, ...]], get: ReadBox) -> ReadBox:
    return lambda index, box: op.read_box(index, box, shapes, get)


def expand(rows: Sequence[RowData], config: object, max_tensors: int | None = None) -> list[Row]:
    """Checks rows and expands them for the layers of a model.

    Args:
        rows: The rows of a family; ``{i}`` stands for each layer number below the field
            ``num_layers``.
        config: The configuration of the model, with fields as attributes or keys.
        max_tensors: The number of tensors in the source. Each layer has at least one, so a
            configuration with many more layers is refused before any row is expanded.

    Returns:
        One row for each layer that a row applies to.

    Raises:
        CheckpointError: There are more layers than tensors, or too many names; or a row is invalid.
            The message names the row, the problem and the nearest known word.
    """
    expanded, count = [], 0
    for data in rows:
        row, where = _row(data, config)
        layers = select_layers(row.ours[0], where, config, max_tensors)
        count += len(layers) * len(row.theirs)
        if count > _MOST_NAMES:
            raise CheckpointError(
                f"row {row.ours[0]!r}: the layers and experts of the configuration result in more "
                f"than {_MOST_NAMES} tensors"
            )
        for i in layers:
            ours, theirs = (
                tuple(name.replace(LAYER, str(i)) for name in names)
                for names in (row.ours, row.theirs)
            )
            expanded.append(Row(ours, theirs, row.ops))
    for side, names in (
        ("ours", [name for row in expanded for name in row.ours]),
        ("theirs", [name for row in expanded for name in row.theirs]),
    ):
        if len(set(names)) < len(names):
            twice = max(Counter(names).items(), key=lambda entry: entry[1])[0]
            raise CheckpointError(f"two rows name {twice!r} ({side}); use one row for each tensor")
    return expanded


def _row(data: RowData, config: object) -> tuple[Row, Mapping[str, Any]]:
    try:
        given, theirs, steps, where = data if len(data) == 4 else (*data, {})
        ours = (given,) if isinstance(given, str) else tuple(given)
        pairs = [(name, dict(arguments)) for name, arguments in steps]
        sound = not isinstance(theirs, str) and len(theirs) > 0 and len(ours) > 0
        sound = sound and isinstance(where, Mapping)
    except (TypeError, ValueError):
        sound = False
    if not sound:
        raise CheckpointError(
            f"row {data!r} is not (ours, [theirs], [(operation, arguments)]) or that with layers"
        )
    first = ours[0]
    for name in (*ours, *theirs):
        if "{" in name.replace(LAYER, "") or "}" in name.replace(LAYER, ""):
            raise CheckpointError(f"row {first!r}: {name!r} has a pattern other than {LAYER}")
        if (LAYER in name) != (LAYER in first):
            raise CheckpointError(f"row {first!r}: only some of its names have {LAYER}")
    ops = tuple(_op(first, name, arguments, config) for name, arguments in pairs)
    count = len(theirs)
    for op in ops:
        count = op.num_outputs(count)
    if count != len(ours):
        one = "one" if len(ours) == 1 else f"{len(ours)} of ours"
        raise CheckpointError(
            f"row {first!r}: no operation joins its {len(theirs)} tensors into {one}"
            if len(ours) == 1
            else f"row {first!r}: its operations turn {len(theirs)} tensors into {count}, not {one}"
        )
    return Row(ours, tuple(theirs), ops), where


def _op(ours: str, name: str, arguments: Mapping[str, Any], config: object) -> Op:
    if name not in OPS:
        raise CheckpointError(f"row {ours!r}: unknown operation {name!r}{did_you_mean(name, OPS)}")
    kind: Any = OPS[name]
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for argument in arguments:
        if argument not in fields:
            hint = did_you_mean(argument, fields)
            raise CheckpointError(f"row {ours!r}: {name} has no argument {argument!r}{hint}")
    for argument, field in fields.items():
        if argument not in arguments and field.default is dataclasses.MISSING:
            raise CheckpointError(f"row {ours!r}: {name} needs the argument {argument!r}")
    values: dict[str, Any] = {}
    for argument, value in arguments.items():
        if argument == "value":
            values[argument] = _real(value, ours)
            continue
        many = argument in ("sizes", "shape", "source", "dims")
        if many != (isinstance(value, Sequence) and not isinstance(value, str)):
            word = "a list" if many else "one number"
            raise CheckpointError(f"row {ours!r}: {name} needs {word} for {argument!r}: {value!r}")
        lowest = {"dim": 0, "dims": 0, "only": 0, "shape": -1, "source": -1}.get(argument, 1)
        numbers = [resolve_int(each, config, ours, lowest) for each in (value if many else [value])]
        values[argument] = tuple(numbers) if many else numbers[0]
    op: Op = kind(**values)
    return op


def _real(value: object, ours: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"row {ours!r}: {value!r} is not a number")
    return float(value)
