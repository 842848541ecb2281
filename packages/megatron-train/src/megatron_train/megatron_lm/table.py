"""The table of Megatron-LM's flags and their status here.

The data is in the YAML files of the folder ``flags`` beside this module, one file for each subject.
A file has a ``title`` and, under each status, reasons with the flags that they apply to. A flag is
followed by its values: nothing, ``N``, ``N N``, ``N...`` (one or more), ``[N...]`` (any number) or
``{a,b}`` (one of these values; others are refused).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from megatron_train.errors import TrainError

STATUSES = ("works", "alias", "no effect", "planned", "refused")
"""The possible statuses of a flag."""


@dataclass(frozen=True)
class MegatronFlag:
    """A flag of Megatron-LM and its status here.

    Attributes:
        flag: The flag, such as ``--num-layers``.
        metavar: Its values as in a usage line; empty for a switch.
        status: One of `STATUSES`.
        reason: What the flag sets, why it has no effect or is refused, or the planned feature that
            will support it. Empty if the flag works.
        commands: Commands that accept the flag if it works.
        subject: Title of the flag's group.
        in_parser: Whether the flag is in Megatron-LM's argument parser for training, at the commit
            that the table was compared with. Otherwise it is of another version or program.
    """

    flag: str
    metavar: str
    status: str
    reason: str
    commands: tuple[str, ...]
    subject: str
    in_parser: bool

    @property
    def accepted(self) -> bool:
        """Whether `megatron-train pretrain gpt` accepts the flag."""
        if self.status == "works":
            return "megatron-train pretrain gpt" in self.commands
        return self.status in ("alias", "no effect")

    @property
    def arity(self) -> int | str:
        """The number of values, or ``+`` or ``*`` as in `argparse`."""
        if self.metavar.startswith("["):
            return "*"
        return "+" if self.metavar.endswith("...") else len(self.metavar.split())

    @property
    def choices(self) -> tuple[str, ...]:
        """The only values that are accepted; empty if every value is."""
        if not self.metavar.startswith("{"):
            return ()
        return tuple(self.metavar.strip("{}").split(","))

    def message(self) -> str:
        """Returns the error line for a command that does not accept this flag."""
        if self.status == "works":
            return f"{self.flag} is a flag of {' and '.join(self.commands)}"
        if self.status == "alias":
            return f"{self.flag} is a flag of megatron-train pretrain gpt: it {self.reason}"
        if self.status == "no effect":
            return f"{self.flag} has no effect here: {self.reason}"
        if self.status == "planned":
            return f"{self.flag} is not supported yet; planned: {self.reason}"
        return f"{self.flag} is a flag of Megatron-LM and is refused here: {self.reason}"

    def invalid_value_message(self, values: Sequence[str]) -> str:
        """Returns an error line if a value is not one of the choices, else an empty string."""
        wrong = [value for value in values if self.choices and value not in self.choices]
        if not wrong:
            return ""
        why = f": {self.reason}" if self.reason else ""
        return (
            f"{self.flag} {wrong[0]} is not supported{why}; give "
            f"{' or '.join(self.choices)}, or leave it out"
        )


def megatron_flags() -> dict[str, MegatronFlag]:
    """Returns every flag of the table by its spelling, in the order of the files.

    Raises:
        TrainError: A file has an unknown status, or a flag is listed twice.
    """
    folder = resources.files("megatron_train.megatron_lm").joinpath("flags")
    flags: dict[str, MegatronFlag] = {}
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        for flag in _read(yaml.safe_load(file.read_text(encoding="utf-8"))):
            if flag.flag in flags:
                raise TrainError(f"table of flags, {flag.subject}: {flag.flag} is listed twice")
            flags[flag.flag] = flag
    return flags


def _read(document: dict[str, Any]) -> list[MegatronFlag]:
    subject, in_parser = document.pop("title"), document.pop("parser", True)
    flags = []
    for kind, reasons in document.items():
        name = kind.replace("_", " ")
        if name not in STATUSES:
            raise TrainError(f"table of flags, {subject}: unknown status {kind!r}")
        for reason, entries in reasons.items():
            for entry in entries:
                flag, _, takes = entry.partition(" ")
                commands = tuple(reason.split(", ")) if name == "works" else ()
                text = "" if commands else reason
                flags.append(MegatronFlag(flag, takes, name, text, commands, subject, in_parser))
    return flags
