"""The state tensors of an optimizer, and their views for checkpoints."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from megatron_parallel import View
from torch import Tensor

from megatron_optim.mixed_precision import MainParameters
from megatron_optim.param_groups import ParameterGroup
from megatron_optim.rounded_pieces import RoundedPieces
from megatron_optim.state_format_config import StateFormatConfig
from megatron_optim.stored import Stored
from megatron_optim.update_rule import MAIN_SUFFIX, UpdateRule
from megatron_optim.update_squares import UpdateSquares
from megatron_optim.working_copies import Operands, Values, WholeTensors, new_state, operands


def names_of_state(rules: Iterable[UpdateRule]) -> tuple[str, ...]:
    """Returns the names of the state tensors that rules have for a parameter."""
    names = [(*(each.name for each in rule.state), *rule.summed_state) for rule in rules]
    return tuple(dict.fromkeys(name for each in names for name in each))


class OptimizerState:
    """State of the parameters of this rank.

    Args:
        groups: The groups of parameters, whose rules describe the state.
        main: The main parameters.
        formats: The formats of state.

    Attributes:
        values: The state by name of the state tensor and of the parameter.
        squares: What measures the update of the current step, if anything does.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        main: MainParameters,
        formats: StateFormatConfig,
    ) -> None:
        self._groups = groups
        self._main = main
        self.squares: UpdateSquares | None = None
        self.values: dict[str, dict[str, Values]] = {}
        self._repeated: dict[tuple[object, ...], RoundedPieces | WholeTensors | None] = {}
        self._copies: list[tuple[Stored, Tensor]] = []  # into which a checkpoint may be loaded
        for group in groups:
            for state_tensor in group.rule.state:
                self.values.setdefault(state_tensor.name, {}).update(
                    {n: new_state(state_tensor, main.tensors[n], formats) for n in group.names}
                )

    def operands(
        self, group: ParameterGroup, gradients: Mapping[str, Tensor], *, rounds: bool = False
    ) -> Iterator[Operands]:
        """Yields the operands of each call of a group's rule, and stores the results.

        Args:
            group: The group.
            gradients: The gradients by name.
            rounds: Whether to round fp32 copies into the model's parameters after each call.
        """
        if found := self._found(group, rounds):
            return found.operands(gradients)
        mains, rounded = self._values(rounds)
        return operands(group, mains, gradients, self.values, rounded=rounded, squares=self.squares)

    def passes_whole(self, group: ParameterGroup) -> bool:
        """Returns whether `operands` yields all main parameters of a group at once, themselves.

        They are then in the order of the names of the group.
        """
        return isinstance(self._found(group, rounds=False), WholeTensors)

    def _found(self, group: ParameterGroup, rounds: bool) -> RoundedPieces | WholeTensors | None:
        """Returns operands of a group that are made once; None if they are made in this step."""
        if self.squares is not None:
            return None
        key = (group.names, group.rule, rounds)
        if key not in self._repeated:
            self._repeated[key] = self._repeat(group, rounds)
        return self._repeated[key]

    def _values(self, rounds: bool) -> tuple[dict[str, Values], dict[str, Tensor]]:
        """Returns the main parameters, and the tensors that they are rounded into."""
        return {**self._main.tensors, **self._main.stored}, self._main.rounded if rounds else {}

    def _repeat(self, group: ParameterGroup, rounds: bool) -> RoundedPieces | WholeTensors | None:
        """Returns operands of a group that are equal in every step but for the gradients."""
        mains, rounded = self._values(rounds)
        whole = WholeTensors.of(group, mains, self.values, rounded)
        return whole or (RoundedPieces.of(group, mains, self.values, rounded) if rounds else None)

    def tensors(self) -> list[Tensor]:
        """Returns the tensors of state and main parameters as they are stored."""
        main = self._main
        values: list[Values] = [*main.copies.values(), *main.hosted.values()]
        values += main.stored.values()
        values += [value for each in self.values.values() for value in each.values()]
        values += [
            v.tensor for g in self._groups for views in g.rule.views().values() for v in views
        ]
        parts = (v.tensors if isinstance(v, Stored) else (v,) for v in values)
        return [tensor for part in parts for tensor in part]

    def views(self) -> dict[str, list[View]]:
        """Returns views by name, ``PARAMETER.STATE``.

        Values in other formats are copied to fp32. `store_copies` stores the copies again.
        """
        self.forget_copies()
        state: dict[str, Mapping[str, Values]] = {**self.values, MAIN_SUFFIX: self._main.saved}
        summed = {name: views for each in self._groups for name, views in each.rule.views().items()}
        return summed | {
            f"{name}.{suffix}": views
            for suffix, values in state.items()
            for name, views in self._main.views(self._copied(values)).items()
        }

    def _copied(self, values: Mapping[str, Values]) -> dict[str, Tensor]:
        """Returns values by name; copies of those that are stored in other forms."""
        found = {n: v.load_all() if isinstance(v, Stored) else v for n, v in values.items()}
        self._copies += [(v, found[n]) for n, v in values.items() if isinstance(v, Stored)]
        return found

    def store_copies(self) -> None:
        """Stores the copies that `views` returned, into which a checkpoint was loaded."""
        for stored, values in self._copies:
            stored.store_all(values)
        self.forget_copies()

    def forget_copies(self) -> None:
        """Drops the copies that `views` returned."""
        self._copies.clear()
