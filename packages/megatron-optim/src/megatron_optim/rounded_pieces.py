"""Main parameters that a CPU updates and rounds piece by piece, while they are in its caches.

Rounding all of them after the update would read them from memory again. The views of the pieces are
made once: making them in every step would take as long as it saves.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_optim.param_groups import ParameterGroup
from megatron_optim.working_copies import Operands, Values, rounds_flat_ranges

PIECE_OF_THREAD = 2**17
"""Elements of a piece for each thread: parameters, gradients and two moments take 2 MiB."""


class _Call(NamedTuple):
    """The operands of one call of a rule, and what is rounded after it."""

    parameters: list[Tensor]
    state: dict[str, list[Tensor]]
    sources: list[Tensor]
    rounded: list[Tensor]


class RoundedPieces:
    """The pieces of a group of parameters, for a rule that updates each element by itself.

    Args:
        group: The group.
        mains: The main parameters by name.
        state: The state by name of the state tensor and of the parameter.
        rounded: The tensors that main parameters are rounded into, by name.
        piece: The largest number of elements of a tensor in one call. Defaults to
            `PIECE_OF_THREAD` for each thread of torch.
    """

    def __init__(
        self,
        group: ParameterGroup,
        mains: Mapping[str, Tensor],
        state: Mapping[str, Mapping[str, Tensor]],
        rounded: Mapping[str, Tensor],
        piece: int | None = None,
    ) -> None:
        self._names = group.names
        self._piece = piece or PIECE_OF_THREAD * torch.get_num_threads()
        self._calls: list[_Call] = []
        room = 0
        for name in group.names:
            kept = {key: self._cut(table[name]) for key, table in state.items()}
            into = self._cut(rounded[name]) if name in rounded else None
            for number, parameter in enumerate(self._cut(mains[name])):
                if room <= 0:
                    self._calls.append(_Call([], {key: [] for key in state}, [], []))
                    room = self._piece
                call = self._calls[-1]
                call.parameters.append(parameter)
                for key, parts in kept.items():
                    call.state[key].append(parts[number])
                if into is not None:
                    call.sources.append(parameter)
                    call.rounded.append(into[number])
                room -= parameter.numel()

    @classmethod
    def of(
        cls,
        group: ParameterGroup,
        mains: Mapping[str, Values],
        state: Mapping[str, Mapping[str, Values]],
        rounded: Mapping[str, Tensor],
    ) -> "RoundedPieces | None":
        """Returns the pieces of a group; None if it rounds nothing or has values in other forms."""
        kept = {each.name: state[each.name] for each in group.rule.state}
        whole = {key: _tensors(group, table) for key, table in {"": mains, **kept}.items()}
        own = whole.pop("")
        if len(own) < len(group.names) or any(len(each) < len(own) for each in whole.values()):
            return None
        return cls(group, own, whole, rounded) if rounds_flat_ranges(group, own, rounded) else None

    def operands(self, gradients: Mapping[str, Tensor]) -> Iterator[Operands]:
        """Yields the operands of each call; rounds the piece after it.

        Args:
            gradients: The gradients by name.
        """
        cut = [part for name in self._names for part in self._cut(gradients[name].contiguous())]
        start = 0
        for call in self._calls:
            stop = start + len(call.parameters)
            yield call.parameters, cut[start:stop], call.state
            start = stop
            if call.rounded:
                torch._foreach_copy_(call.rounded, call.sources)

    def _cut(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return torch.split(tensor.detach().view(-1), self._piece)


def _tensors(group: ParameterGroup, values: Mapping[str, Values]) -> dict[str, Tensor]:
    return {n: value for n in group.names if isinstance(value := values[n], Tensor)}
