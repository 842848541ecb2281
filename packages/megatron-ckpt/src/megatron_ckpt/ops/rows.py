"""Rows as data: checked, with the fields of a model put in, written out for its layers."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_ckpt.errors import CheckpointError, did_you_mean
from megatron_ckpt.ops.definitions import OPS, Op

if TYPE_CHECKING:
    from torch import Tensor

LAYER = "{i}"
_FEW_LAYERS = 1000  # so many may be written out, to say which tensor is missing
_MOST_NAMES = 2_000_000  # of a model; the largest published ones have some 50,000

Step = tuple[str, Mapping[str, Any]]
RowData = tuple[str, Sequence[str], Sequence[Step]]
"""Our name, their names, and the operations from theirs to ours; see ``schema.json``."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor of ours and the tensors of theirs it is made of, for one layer of one model."""

    ours: str
    theirs: tuple[str, ...]
    ops: tuple[Op, ...]

    def forward(self, tensors: Sequence["Tensor"]) -> "Tensor":
        """Make our tensor from theirs."""
        held = list(tensors)
        for op in self.ops:
            held = self._run(op, lambda op=op, held=held: op.forward(held), held)
        return held[0]

    def inverse(self, tensor: "Tensor") -> list["Tensor"]:
        """Make their tensors from ours."""
        counts = [len(self.theirs)]
        for op in self.ops:
            counts.append(1 if op.joins else counts[-1])
        held = [tensor]
        for op, count in zip(reversed(self.ops), reversed(counts[:-1]), strict=True):
            held = self._run(op, lambda op=op, n=count, held=held: op.inverse(held, n), held)
        return held

    def _run(self, op: Op, call: Any, held: Sequence["Tensor"]) -> list["Tensor"]:
        try:
            result: list[Tensor] = call()
        except (ValueError, IndexError, RuntimeError) as error:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in held)
            raise CheckpointError(
                f"{' + '.join(self.theirs)} <-> {self.ours}: {op} cannot take {shapes}: {error}"
            ) from error
        return result


def expand(rows: Sequence[RowData], config: object, most: int | None = None) -> list[Row]:
    """Check rows and write them out for a model.

    Args:
        rows: of a family; ``{i}`` stands for each layer number below the field ``num_layers``.
        config: of the model: fields as attributes or keys.
        most: tensors that the source has. Each layer has one at least, so a configuration of many
            more layers is refused before any row is written out.

    Raises:
        CheckpointError: more layers than tensors, or names without end; or names the row and what
            is wrong with it, with the nearest known word.
    """
    expanded, count = [], 0
    for data in rows:
        row = _row(data, config)
        layers = _layers(row.ours, config, most) if LAYER in row.ours else range(1)
        count += len(layers) * len(row.theirs)
        if count > _MOST_NAMES:
            raise CheckpointError(
                f"row {row.ours!r}: the configuration's layers and experts give more than "
                f"{_MOST_NAMES} tensors"
            )
        for i in layers:
            theirs = tuple(name.replace(LAYER, str(i)) for name in row.theirs)
            expanded.append(Row(row.ours.replace(LAYER, str(i)), theirs, row.ops))
    for side, names in (
        ("ours", [row.ours for row in expanded]),
        ("theirs", [name for row in expanded for name in row.theirs]),
    ):
        if len(set(names)) < len(names):
            twice = max(Counter(names).items(), key=lambda entry: entry[1])[0]
            raise CheckpointError(f"two rows name {twice!r} ({side}): each tensor has one row")
    return expanded


def _layers(ours: str, config: object, most: int | None) -> range:
    count = _number("$num_layers", config, ours, 0)
    if most is not None and count > max(most, _FEW_LAYERS):
        raise CheckpointError(
            f"the configuration says {count} layers, but the source has only {most} tensors"
        )
    return range(count)


def _row(data: RowData, config: object) -> Row:
    try:
        ours, theirs, steps = data
        pairs = [(name, dict(arguments)) for name, arguments in steps]
        sound = not isinstance(theirs, str) and len(theirs) > 0
    except (TypeError, ValueError):
        sound = False
    if not sound:
        raise CheckpointError(f"row {data!r} is not (ours, [theirs], [(operation, arguments)])")
    for name in (ours, *theirs):
        if "{" in name.replace(LAYER, "") or "}" in name.replace(LAYER, ""):
            raise CheckpointError(f"row {ours!r}: {name!r} has another pattern than {LAYER}")
        if (LAYER in name) != (LAYER in ours):
            raise CheckpointError(f"row {ours!r}: {LAYER} stands in some of its names only")
    ops = tuple(_op(ours, name, arguments, config) for name, arguments in pairs)
    count = len(theirs)
    for op in ops:
        count = 1 if op.joins else count
    if count != 1:
        raise CheckpointError(f"row {ours!r}: nothing joins its {count} tensors into one")
    return Row(ours, tuple(theirs), ops)


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
        many = argument in ("sizes", "shape", "source")
        if many != (isinstance(value, Sequence) and not isinstance(value, str)):
            word = "a list" if many else "one number"
            raise CheckpointError(f"row {ours!r}: {name} takes {word} for {argument!r}: {value!r}")
        lowest = {"dim": 0, "only": 0, "shape": -1, "source": -1}.get(argument, 1)
        numbers = [_number(each, config, ours, lowest) for each in (value if many else [value])]
        values[argument] = tuple(numbers) if many else numbers[0]
    op: Op = kind(**values)
    return op


def _number(value: object, config: object, ours: str, lowest: int) -> int:
    number = field_of(value, config, ours) if isinstance(value, str) else value
    if (
        isinstance(number, bool)
        or not isinstance(number, int)
        or number < lowest
        or (lowest == -1 and number == 0)
    ):
        raise CheckpointError(f"row {ours!r}: {value!r} is not a number from {lowest}")
    return number


def field_of(value: str, config: object, ours: str) -> Any:
    """Return the field of a configuration that ``"$field"`` names; ``ours`` is for messages."""
    name = value.removeprefix("$")
    known = list(config) if isinstance(config, Mapping) else dir(config)
    if name == value or name not in known:
        hint = did_you_mean(name, (word for word in known if not word.startswith("_")))
        raise CheckpointError(f"row {ours!r}: the model configuration has no {value!r}{hint}")
    return config[name] if isinstance(config, Mapping) else getattr(config, name)
