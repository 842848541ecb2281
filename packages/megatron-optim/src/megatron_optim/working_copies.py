"""The tensors that a rule updates, from state that is stored in other forms.

Values that are stored as they are updated are passed to the rule themselves. Others are copied for
the update and stored again after it, a piece at a time, so that the copies take little memory. On a
CPU, main parameters are also rounded a piece at a time (`megatron_optim.rounded_pieces`).
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_optim.mixed_precision import update_dtype
from megatron_optim.param_groups import ParameterGroup
from megatron_optim.state_format_config import StateFormatConfig
from megatron_optim.stored import Part, Rounded, Scaled, Stored
from megatron_optim.update_rule import StateTensor
from megatron_optim.update_squares import UpdateSquares

EMPTY: Mapping[str, Tensor] = MappingProxyType({})

Values = Tensor | Stored

PIECE = 2**24
PIECE_ON_CPU = 2**20
"""The largest number of elements that are copied at once, except for whole matrices.

They are multiples of `BLOCK`. On a CPU the copies fit into its caches.
"""

Operands = tuple[list[Tensor], list[Tensor], dict[str, list[Tensor]]]
"""The parameters, gradients and state of one call of a rule."""


class _Range(NamedTuple):
    """Elements of a parameter that are updated in one call; all of them if ``stop`` is None."""

    name: str
    start: int = 0
    stop: int | None = None


class WholeTensors:
    """The operands of a group whose values are all updated in place, found once.

    Args:
        names: The names of the parameters.
        parameters: The main parameters.
        state: The state by name of the state tensor.
    """

    def __init__(
        self, names: Sequence[str], parameters: list[Tensor], state: dict[str, list[Tensor]]
    ) -> None:
        self._names, self._parameters, self._state = names, parameters, state

    @classmethod
    def of(
        cls,
        group: ParameterGroup,
        mains: Mapping[str, Values],
        state: Mapping[str, Mapping[str, Values]],
        rounded: Mapping[str, Tensor],
    ) -> "WholeTensors | None":
        """Returns the operands; None if a value has another form or shape, or is rounded."""
        if group.matrices or any(name in rounded for name in group.names):
            return None
        tables = {"": mains} | {kept.name: state[kept.name] for kept in group.rule.state}
        found = {
            key: [value for name in group.names if isinstance(value := table[name], Tensor)]
            for key, table in tables.items()
        }
        if any(len(tensors) < len(group.names) for tensors in found.values()):
            return None
        return cls(group.names, found.pop(""), found)

    def operands(self, gradients: Mapping[str, Tensor]) -> Iterator[Operands]:
        """Yields the operands of one call.

        Args:
            gradients: The gradients by name.
        """
        yield self._parameters, [gradients[name] for name in self._names], self._state


def new_state(state: StateTensor, parameter: Tensor, formats: StateFormatConfig) -> Values:
    """Returns state of a parameter, which is 0, in its format.

    Args:
        state: Its description.
        parameter: The main parameter, or the parameter of one that is stored in another form.
        formats: The formats of state.
    """
    format_name = formats.format_of(state.name)
    dtype = state.dtype or update_dtype(parameter)
    if format_name == "fp32":
        return torch.zeros_like(parameter, dtype=dtype)
    if format_name == "bf16":
        return Rounded(parameter, dtype)
    return Scaled(parameter, dtype, format_name, state.positive)


def operands(
    group: ParameterGroup,
    mains: Mapping[str, Values],
    gradients: Mapping[str, Tensor],
    state: Mapping[str, Mapping[str, Values]],
    piece: int | None = None,
    rounded: Mapping[str, Tensor] = EMPTY,
    squares: UpdateSquares | None = None,
) -> Iterator[Operands]:
    """Yields the operands of each call of a group's rule; stores the results after the call.

    A rule that needs matrices or sums is called once. So is every rule if all values are stored as
    they are updated, none is rounded, and no squares are measured.

    Args:
        group: The group.
        mains: The main parameters by name.
        gradients: The gradients by name.
        state: The state by name of the state tensor and of the parameter.
        piece: The largest number of elements in a call, a multiple of `BLOCK`. Defaults to `PIECE`,
            or `PIECE_ON_CPU`.
        rounded: The tensors that main parameters are rounded into after each call.
        squares: Measures the update. Defaults to None.
    """
    names = [kept.name for kept in group.rule.state]
    tables = [mains, *(state[each] for each in names)]
    plain = all(isinstance(table[name], Tensor) for table in tables for name in group.names)
    pieces = group.rule.needs == "elements" and (
        not plain
        or rounds_flat_ranges(group, mains, rounded)
        or (_flat(group, mains, rounded) and squares is not None)
    )
    if group.matrices or pieces or not plain:  # autograd may return gradients with other strides
        gradients = {name: gradients[name].contiguous() for name in group.names}
    if pieces:
        on_cpu = gradients[group.names[0]].device.type == "cpu"
        calls = _calls(group, mains, gradients, piece or (PIECE_ON_CPU if on_cpu else PIECE))
    else:
        calls = iter([[_Range(name) for name in group.names]])
    for ranges in calls:
        loaded = [_load(table, ranges, group) for table in tables]
        parameters, *kept = loaded
        before = None if squares is None else squares.copy(parameters)
        yield parameters, _load(gradients, ranges, group), dict(zip(names, kept, strict=True))
        if squares is not None and before is not None:
            squares.add([each.name for each in ranges], before, parameters)
            del before
        if not plain:
            for table, held in zip(tables, loaded, strict=True):
                _store(table, ranges, held)
        rounds = [each.name in rounded for each in ranges]
        if any(rounds):
            into = _load(rounded, list(compress(ranges, rounds)), group)
            torch._foreach_copy_(into, list(compress(parameters, rounds)))


def _flat(
    group: ParameterGroup, mains: Mapping[str, Values], rounded: Mapping[str, Tensor]
) -> bool:
    """Returns whether flat ranges of all parameters exist."""
    tensors = [table[n] for table in (mains, rounded) for n in group.names if n in table]
    return all(isinstance(t, Tensor) and t.is_contiguous() for t in tensors)


def rounds_flat_ranges(
    group: ParameterGroup, mains: Mapping[str, Values], rounded: Mapping[str, Tensor]
) -> bool:
    """Returns whether a rule can update, and round, main parameters of a group in flat ranges."""
    rounds = group.rule.needs == "elements" and any(name in rounded for name in group.names)
    return rounds and _flat(group, mains, rounded)


def _calls(
    group: ParameterGroup,
    mains: Mapping[str, Values],
    gradients: Mapping[str, Tensor],
    piece: int,
) -> Iterator[list[_Range]]:
    """Yields the ranges of each call, which together have at most ``piece`` elements if cut."""
    ranges: list[_Range] = []
    room = piece
    for name in group.names:
        main, numel = mains[name], gradients[name].numel()
        if numel <= piece or (isinstance(main, Stored) and not main.cut):
            ranges, room = [*ranges, _Range(name)], room - numel
        else:
            for start in range(0, numel, piece):
                stop = min(start + piece, numel)
                ranges, room = [*ranges, _Range(name, start, stop)], room - (stop - start)
                if room <= 0:
                    yield ranges
                    ranges, room = [], piece
        if room <= 0:
            yield ranges
            ranges, room = [], piece
    if ranges:
        yield ranges


def _load(
    values: Mapping[str, Values], ranges: Sequence[_Range], group: ParameterGroup
) -> list[Tensor]:
    """Returns ranges of values, in the shape that the rule of the group needs if they are whole."""
    parts = _parts(values, ranges)
    copies = iter(parts[0].stored.load(parts) if parts else ())
    found = []
    for name, start, stop in ranges:
        value = values[name]
        if not isinstance(value, Tensor):
            copied: Tensor = next(copies)
            value = copied.view(value.shape) if stop is None else copied
        elif stop is not None:
            value = value.view(-1)[start:stop]
        if stop is None and group.matrices:
            value = value.view(group.matrices[name])
        found.append(value)
    return found


def _store(values: Mapping[str, Values], ranges: Sequence[_Range], held: Sequence[Tensor]) -> None:
    """Stores the copies that `_load` returned; leaves values that were passed themselves."""
    if parts := _parts(values, ranges):
        copied = (not isinstance(values[each.name], Tensor) for each in ranges)
        parts[0].stored.store(parts, [copy.reshape(-1) for copy in compress(held, copied)])


def _parts(values: Mapping[str, Values], ranges: Sequence[_Range]) -> list[Part]:
    """Returns the ranges of stored values."""
    return [
        Part(value, start, value.numel if stop is None else stop)
        for name, start, stop in ranges
        if not isinstance(value := values[name], Tensor)
    ]
