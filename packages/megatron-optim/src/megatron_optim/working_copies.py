"""The tensors that a rule updates, from state that is stored in other forms.

Values that are stored as they are updated are passed to the rule themselves. Others are copied for
the update and stored again after it, a piece at a time, so that the copies take little memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_optim.mixed_precision import update_dtype
from megatron_optim.param_groups import ParameterGroup
from megatron_optim.state_format_config import StateFormatConfig
from megatron_optim.stored import Part, Rounded, Scaled, Stored
from megatron_optim.update_rule import StateTensor

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
) -> Iterator[Operands]:
    """Yields the operands of each call of a group's rule; stores the results after the call.

    A rule that needs matrices or sums is called once. So is every rule if all values are stored as
    they are updated.

    Args:
        group: The group.
        mains: The main parameters by name.
        gradients: The gradients by name.
        state: The state by name of the state tensor and of the parameter.
        piece: The largest number of elements in a call, a multiple of `BLOCK`. Defaults to `PIECE`,
            or `PIECE_ON_CPU`.
    """
    names = [kept.name for kept in group.rule.state]
    plain = not any(
        isinstance(values[name], Stored)
        for values in (mains, *(state[kept] for kept in names))
        for name in group.names
    )
    whole = [_Range(name) for name in group.names]
    if group.matrices or not plain:  # autograd may return gradients with other strides
        gradients = {name: gradients[name].contiguous() for name in group.names}
    if plain or group.rule.needs != "elements":
        calls = iter([whole])
    else:
        on_cpu = gradients[group.names[0]].device.type == "cpu"
        calls = _calls(group, mains, gradients, piece or (PIECE_ON_CPU if on_cpu else PIECE))
    for ranges in calls:
        parameters = _load(mains, ranges, group)
        kept = {each: _load(state[each], ranges, group) for each in names}
        yield parameters, _load(gradients, ranges, group), kept
        for values, held in ((mains, parameters), *((state[each], kept[each]) for each in names)):
            found = [(p, h) for p, h in zip(_parts(values, ranges), held, strict=True) if p]
            if found:
                parts = [part for part, _ in found]
                parts[0].stored.store(parts, [value.reshape(-1) for _, value in found])


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
        if isinstance(main, Stored) and not main.cut:
            ranges, room = [*ranges, _Range(name, 0, numel)], room - numel
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


def _parts(values: Mapping[str, Values], ranges: Sequence[_Range]) -> list[Part | None]:
    """Returns the range of each stored value; None for values that are passed themselves."""
    found: list[Part | None] = []
    for name, start, stop in ranges:
        value = values[name]
        end = value.numel if stop is None and isinstance(value, Stored) else stop
        found.append(Part(value, start, end or 0) if isinstance(value, Stored) else None)
    return found


def _load(
    values: Mapping[str, Values], ranges: Sequence[_Range], group: ParameterGroup
) -> list[Tensor]:
    """Returns ranges of values, in the shape that the rule of the group needs if they are whole."""
    stored = [part for part in _parts(values, ranges) if part]
    copies = iter(stored[0].stored.load(stored) if stored else ())
    found = []
    for name, start, stop in ranges:
        value = values[name]
        if isinstance(value, Tensor):
            found.append(value if stop is None else value.view(-1)[start:stop])
        else:
            copied: Tensor = next(copies)
            found.append(copied.view(value.shape) if stop is None else copied)
        if stop is None and group.matrices:
            found[-1] = found[-1].view(group.matrices[name])
    return found
