"""Command-line flags generated from options."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_train import _command
from megatron_train.config.aliases import ALIASES, FLAG_VALUE, ONE_VALUE, VALUE_ALIASES, Alias
from megatron_train.config.grouped_help import add_help_of_groups, format_brief_help
from megatron_train.config.options import Option
from megatron_train.config.values import GivenValue, Values
from megatron_train.errors import TrainError, UsageError, collect_errors

if TYPE_CHECKING:
    from megatron_train.megatron_lm.table import MegatronFlag

_PREFIX = "option:"
_WEAK = "weak:"
_LONGEST_CHOICES = 80
"""Columns that the choices may take after a flag; longer lists are part of the help text."""

_WITHOUT_EFFECT = "without_effect"


class Parser(_command.Parser):
    """The parser of every command. Knows Megatron-LM's flags too.

    Args:
        megatron: Whether to accept flags of Megatron-LM that have no effect here.
        flags: Adds flags to the parser when it is first used, since a command line uses one of
            many commands with hundreds of flags each.
        settings: Arguments of `_command.Parser`.
    """

    def __init__(
        self,
        *,
        megatron: bool = False,
        flags: "Callable[[Parser], None] | None" = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self._megatron = megatron
        self._flags = flags
        self._groups: Mapping[str, Any] = {}

    def complete(self) -> None:
        """Adds the flags that wait for the first use of this parser."""
        add, self._flags = self._flags, None
        if add is not None:
            add(self)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parses a command line with all flags, as `_command.Parser` does."""
        self.complete()
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        """Returns the help with all flags, or with the groups of `show_groups`."""
        self.complete()
        if self._groups:
            return format_brief_help(self, self._groups)
        return super().format_help()

    def show_groups(self, groups: Mapping[str, Any]) -> None:
        """Makes the help show groups of flags, and adds a flag that shows the flags.

        Args:
            groups: Groups of flags by name.
        """
        self._groups = groups
        add_help_of_groups(self, groups)

    def unknown_option_errors(self, words: Sequence[str]) -> list[str]:
        """Returns a line for each option that this command does not take.

        Options of Megatron-LM that have no effect here become options of this parser.
        """
        lines = [
            f"{flag} takes one value, not {' '.join(values)}; {ONE_VALUE[flag]}"
            for flag, *values in _lists(words)
            if flag in ONE_VALUE and flag in self._option_string_actions and values[1:]
        ]
        unknown_options = self.find_unknown_options(words)
        if not unknown_options:
            return lines
        from megatron_train.megatron_lm.table import megatron_flags

        table = megatron_flags()
        known = (*self._option_string_actions, *table)
        for index in unknown_options:
            name, equals, value = words[index].partition("=")
            flag = table.get(name)
            if flag is None:
                lines.append(f"unknown argument {name}{_command.nearest(name, known)}")
            elif not (self._megatron and flag.status == "no effect"):
                lines.append(flag.message())
            elif message := flag.invalid_value_message(
                [value] if equals else words[index + 1 :][:1]
            ):
                lines.append(message)
            elif name not in self._option_string_actions:
                self._accept(flag)
        return lines

    def _accept(self, flag: "MegatronFlag") -> None:
        nargs = None if flag.arity == 1 else flag.arity
        self.add_argument(
            flag.flag,
            nargs=nargs,
            action=_WithoutEffect,
            const=flag,
            dest=_WITHOUT_EFFECT,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


def _lists(words: Sequence[str]) -> list[list[str]]:
    """Returns each flag of a command line with the words up to the next flag."""
    found: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            found.append([])
        found[-1].append(word)
    return [words for words in found if words]


class _WithoutEffect(argparse.Action):
    """Records a flag that has no effect."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        noted = getattr(namespace, self.dest, ())
        setattr(namespace, self.dest, (*noted, self.const))


def notes_on_ignored_flags(namespace: argparse.Namespace) -> list[str]:
    """Returns one line per reason for which flags in ``namespace`` have no effect."""
    by_reason: dict[str, list[str]] = {}
    for flag in getattr(namespace, _WITHOUT_EFFECT, ()):
        by_reason.setdefault(flag.reason, []).append(flag.flag)
    return [
        f"{', '.join(dict.fromkeys(flags))} {'has' if len(set(flags)) == 1 else 'have'} no effect "
        f"here: {reason}"
        for reason, flags in by_reason.items()
    ]


class _Store(argparse.Action):
    """Stores a value and the given spelling of the flag under the key of its option."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if self.nargs == 0:
            values = self.const
        sets: tuple[tuple[str, Any], ...] = ((self.dest.removeprefix(_PREFIX), values),)
        if isinstance(values, str):
            sets = VALUE_ALIASES.get((sets[0][0], values), sets)
        for key, value in sets:
            setattr(namespace, _PREFIX + key, (value, option_string or ""))


class _StoreAlias(argparse.Action):
    """Stores the values that an alias sets under the keys of their options."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        prefix = _WEAK if self.const.weak else _PREFIX
        for key, value in self.const.sets:
            try:
                stored = self.const.convert(values) if value is FLAG_VALUE else value
            except TrainError as error:
                raise argparse.ArgumentError(self, str(error)) from None
            setattr(namespace, prefix + key, (stored, option_string or ""))


LAYERS_PER_VIRTUAL_STAGE = "--num-layers-per-virtual-pipeline-stage"
"""Megatron's other flag for the number of virtual stages; `resolve` does the division."""


def add_options(
    parser: argparse.ArgumentParser, options: Iterable[Option], titles: Mapping[str, str]
) -> dict[str, Any]:
    """Adds a flag for each option; returns the groups of flags by section."""
    groups: dict[str, Any] = {}
    for option in options:
        if option.section not in groups:
            groups[option.section] = parser.add_argument_group(titles[option.section])
        _add(groups[option.section], option)
        for flag, alias in ALIASES.items():
            if alias.sets[-1][0] == option.key:
                _add_alias(groups[option.section], flag, alias, option)
    return groups


def add_run_options(parser: Parser, options: Iterable[Option], titles: Mapping[str, str]) -> None:
    """Adds the flags of a run: those of its options, and `LAYERS_PER_VIRTUAL_STAGE`.

    The help then shows the sections of the options.
    """
    groups = add_options(parser, options, titles)
    add_layers_per_virtual_stage(groups["layout"])
    parser.show_groups(groups)


def add_layers_per_virtual_stage(group: Any) -> None:
    """Adds `LAYERS_PER_VIRTUAL_STAGE` to a group of flags or to a parser."""
    group.add_argument(
        LAYERS_PER_VIRTUAL_STAGE,
        metavar="N",
        help="layers in a virtual stage; sets the number of virtual stages to "
        "--num-layers / (pipeline ranks x N)",
    )


def _add(group: Any, option: Option) -> None:
    keep = _keep(option)
    text = describe(option).replace("%", "%%")
    if option.kind == "switch":
        group.add_argument(option.flag, nargs=0, const=option.flag_value(), help=text, **keep)
        other = argparse.SUPPRESS
        group.add_argument(
            option.opposite, nargs=0, const=not option.flag_value(), help=other, **keep
        )
        return
    metavar = "{" + ",".join(map(str, option.choices)) + "}" if option.choices else _metavar(option)
    if len(metavar) * (1 + option.repeated) > _LONGEST_CHOICES:  # argparse shows it twice
        metavar, text = "KIND", f"{', '.join(map(str, option.choices))}: {text}"
    group.add_argument(
        option.flag, nargs="+" if option.repeated else None, metavar=metavar, help=text, **keep
    )


def _add_alias(group: Any, flag: str, alias: Alias, option: Option) -> None:
    shown = {"metavar": _metavar(option)} if alias.takes_value else {"nargs": 0}
    group.add_argument(
        flag,
        action=_StoreAlias,
        const=alias,
        dest=_PREFIX + flag,
        default=argparse.SUPPRESS,
        help=alias.help,
        **shown,
    )


def is_setting(action: argparse.Action) -> bool:
    """Returns whether an argument of a parser sets an option of a run, itself or as an alias."""
    return action.dest.startswith(_PREFIX)


def _keep(option: Option) -> dict[str, Any]:
    return {"dest": _PREFIX + option.key, "default": argparse.SUPPRESS, "action": _Store}


def _metavar(option: Option) -> str:
    if option.unit == "path":
        return "PATH"
    # A value of an alias may set a switch.
    return {"integer": "N", "number": "X", "text": "TEXT", "switch": "TEXT"}[option.kind]


def describe(option: Option) -> str:
    """Returns the help of an option with its unit, bounds and default."""
    notes = []
    if option.unit and option.unit != "path":
        notes.append(option.unit)
    if option.bounds:
        notes.append(option.bounds)
    if option.derived_default:
        notes.append(f"default {option.derived_default}")
    elif option.required:
        notes.append("required")
    elif option.kind != "switch" and option.default not in (None, ""):
        notes.append(f"default {option.default_text}")
    elif option.kind == "switch" and option.default is True and option.flag_value():
        notes.append(f"on unless {option.opposite}")
    text = option.help
    if option.kind == "switch" and not option.flag_value():
        text = f"turn off: {text}"
    return text + (f" [{', '.join(notes)}]" if notes else "")


def given_flags(namespace: argparse.Namespace, options: Sequence[Option]) -> Values:
    """Returns the values of the given flags in ``namespace``."""
    return _stored(namespace, options, _PREFIX)


def implied_flags(namespace: argparse.Namespace, options: Sequence[Option]) -> Values:
    """Returns the values that weak aliases in ``namespace`` set."""
    return _stored(namespace, options, _WEAK)


def _stored(namespace: argparse.Namespace, options: Sequence[Option], prefix: str) -> Values:
    given: dict[str, GivenValue] = {}
    wrong: list[str] = []
    for option in options:
        stored = getattr(namespace, prefix + option.key, None)
        if stored is not None:
            value, spelling = stored
            with collect_errors(wrong):
                given[option.key] = GivenValue(option.coerce(value, spelling), spelling)
    if wrong:
        raise UsageError(*wrong, *([f"{len(wrong)} flags cannot be used"] if wrong[1:] else []))
    return Values(given)
