"""Command-line flags made from options."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_train import _command
from megatron_train.config.options import Option
from megatron_train.config.values import Given, Values
from megatron_train.errors import UsageError

_PREFIX = "option:"
_LONGEST_CHOICES = 80
"""Columns that the choices of a flag may take behind it; more of them are told in its help."""

ALIASES: dict[str, tuple[str, Any, str]] = {
    "--grad-reduce-in-bf16": (
        "data_parallel.accumulate_allreduce_grads_in_fp32",
        False,
        "the same as --no-accumulate-allreduce-grads-in-fp32",
    ),
    "--swiglu": ("model.activation", "swiglu", "the same as --activation swiglu"),
    "--use-rotary-position-embeddings": (
        "model.position_embedding_type",
        "rope",
        "the same as --position-embedding-type rope",
    ),
    "--recompute-activations": (
        "recompute.granularity",
        "selective",
        "the same as --recompute-granularity selective",
    ),
}
"""Flags that set another option to a fixed value: option, value, help."""


class Parser(_command.Parser):
    """The parser of every command, which knows Megatron-LM's flags too."""

    def unknown(self, word: str) -> str:
        """Return what to say about an unknown flag: the nearest there is.

        Raises:
            CommandError: it is a flag of Megatron-LM, of which more can be said.
        """
        from megatron_train.config.megatron_flags import find_megatron_flag

        known = find_megatron_flag(word)
        if known is not None:
            raise _command.CommandError(known.answer())
        return super().unknown(word)


class _Store(argparse.Action):
    """Keep a value under its option, with the spelling it was given in."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if self.nargs == 0:
            values = self.const
        setattr(namespace, self.dest, (values, option_string or ""))


LAYERS_PER_VIRTUAL_STAGE = "--num-layers-per-virtual-pipeline-stage"
"""Megatron's other way to say how many virtual stages there are; `resolve` does the division."""


def add_options(
    parser: argparse.ArgumentParser, options: Iterable[Option], titles: Mapping[str, str]
) -> None:
    """Add a flag for each option, grouped by section."""
    groups: dict[str, Any] = {}
    for option in options:
        if option.section not in groups:
            groups[option.section] = parser.add_argument_group(titles[option.section])
        _add(groups[option.section], option)
        for flag, (key, value, text) in ALIASES.items():
            if key == option.key:
                groups[option.section].add_argument(
                    flag, nargs=0, const=value, help=text, **_keep(option)
                )
        if option.key == "layout.vpp":
            groups[option.section].add_argument(
                LAYERS_PER_VIRTUAL_STAGE,
                metavar="N",
                help="sets the flag above to --num-layers / (stages x N)",
            )


def _add(group: Any, option: Option) -> None:
    keep = _keep(option)
    text = describe(option).replace("%", "%%")
    if option.kind == "switch":
        group.add_argument(option.flag, nargs=0, const=option.flag_sets(), help=text, **keep)
        other = argparse.SUPPRESS
        group.add_argument(
            option.opposite, nargs=0, const=not option.flag_sets(), help=other, **keep
        )
        return
    metavar = "{" + ",".join(map(str, option.choices)) + "}" if option.choices else _metavar(option)
    if len(metavar) > _LONGEST_CHOICES:
        metavar, text = "KIND", f"{', '.join(map(str, option.choices))}: {text}"
    group.add_argument(
        option.flag, nargs="+" if option.repeated else None, metavar=metavar, help=text, **keep
    )


def _keep(option: Option) -> dict[str, Any]:
    return {"dest": _PREFIX + option.key, "default": argparse.SUPPRESS, "action": _Store}


def _metavar(option: Option) -> str:
    if option.unit == "path":
        return "PATH"
    return {"integer": "N", "number": "X", "text": "TEXT"}[option.kind]


def describe(option: Option) -> str:
    """Return the help of an option with its unit and default."""
    notes = []
    if option.unit and option.unit != "path":
        notes.append(option.unit)
    if option.derived:
        notes.append(f"default {option.derived}")
    elif option.required:
        notes.append("required")
    elif option.kind != "switch" and option.default is not None:
        notes.append(f"default {option.shown_default}")
    elif option.kind == "switch" and option.default is True and option.flag_sets():
        notes.append(f"on unless {option.opposite}")
    text = option.help
    if option.kind == "switch" and not option.flag_sets():
        text = f"turn off: {text}"
    return text + (f" [{', '.join(notes)}]" if notes else "")


def given_flags(namespace: argparse.Namespace, options: Sequence[Option]) -> Values:
    """Return the values of the flags in ``namespace`` that were given."""
    given: dict[str, Given] = {}
    for option in options:
        stored = getattr(namespace, _PREFIX + option.key, None)
        if stored is not None:
            value, spelling = stored
            given[option.key] = Given(_coerce(option, value, spelling), spelling)
    return Values(given)


def _coerce(option: Option, value: Any, spelling: str) -> Any:
    try:
        return option.coerce(value, spelling)
    except ValueError as error:
        raise UsageError(str(error)) from error
