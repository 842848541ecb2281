"""The table of Megatron-LM's flags: what became of each of them here.

The facts lie in the YAML files of the folder ``flags`` beside this module, one file for each
subject. A file has a ``title`` and, under each kind of answer, reasons with the flags they hold
for. Behind a flag stands what it takes: nothing, ``N``, ``N N``, ``N...`` (one or more),
``[N...]`` (any number) or ``{a,b}`` (one of these values; others are refused).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from megatron_train.errors import TrainError

STATUSES = ("works", "alias", "no effect", "planned", "refused")
"""What can have become of a flag."""


@dataclass(frozen=True)
class MegatronFlag:
    """A flag of Megatron-LM and what became of it.

    Attributes:
        flag: its spelling there.
        metavar: the values behind it, as in a usage line; empty for a switch.
        status: one of `STATUSES`.
        reason: what it sets, why it has no effect or is refused, or what will bring it.
        commands: the commands that take it, where it works.
        subject: title of the group that it belongs to.
        in_parser: whether it is in the argument parser of Megatron-LM's training, at the commit
            that the table was compared with; otherwise it is of another version or program.
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
        """Whether `megatron-train pretrain gpt` takes it."""
        if self.status == "works":
            return "megatron-train pretrain gpt" in self.commands
        return self.status in ("alias", "no effect")

    @property
    def arity(self) -> int | str:
        """Values that it takes: a number, ``+`` or ``*``."""
        if self.metavar.startswith("["):
            return "*"
        return "+" if self.metavar.endswith("...") else len(self.metavar.split())

    @property
    def choices(self) -> tuple[str, ...]:
        """The only values that are accepted, empty where all are."""
        if not self.metavar.startswith("{"):
            return ()
        return tuple(self.metavar.strip("{}").split(","))

    def message(self) -> str:
        """Returns one line for a user who gave this flag to a command that does not take it."""
        if self.status == "works":
            return f"{self.flag} is a flag of {' and '.join(self.commands)}"
        if self.status == "alias":
            return f"{self.flag} is a flag of megatron-train pretrain gpt: it {self.reason}"
        if self.status == "no effect":
            return f"{self.flag} has no effect here: {self.reason}"
        if self.status == "planned":
            return f"{self.flag} is not supported yet, it is planned: {self.reason}"
        return f"{self.flag} is a flag of Megatron-LM that is refused here: {self.reason}"

    def invalid_value_message(self, values: Sequence[str]) -> str:
        """Returns one line if ``values`` are not among the choices of this flag, else nothing."""
        wrong = [value for value in values if self.choices and value not in self.choices]
        if not wrong:
            return ""
        return (
            f"{self.flag} {wrong[0]} is not supported: {self.reason}; give "
            f"{' or '.join(self.choices)}, or leave it out"
        )


def megatron_flags() -> dict[str, MegatronFlag]:
    """Returns every flag that is accounted for by its spelling, file by file.

    Raises:
        TrainError: a file of the package with an unknown kind of answer, or a flag in two places.
    """
    folder = resources.files("megatron_train.megatron_lm").joinpath("flags")
    flags: dict[str, MegatronFlag] = {}
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        for flag in _read(yaml.safe_load(file.read_text(encoding="utf-8"))):
            if flag.flag in flags:
                raise TrainError(f"table of flags, {flag.subject}: {flag.flag} stands there twice")
            flags[flag.flag] = flag
    return flags


def _read(document: dict[str, Any]) -> list[MegatronFlag]:
    subject, in_parser = document.pop("title"), document.pop("parser", True)
    flags = []
    for kind, reasons in document.items():
        name = kind.replace("_", " ")
        if name not in STATUSES:
            raise TrainError(f"table of flags, {subject}: unknown kind {kind!r}")
        for reason, entries in reasons.items():
            for entry in entries:
                flag, _, takes = entry.partition(" ")
                commands = tuple(reason.split(", ")) if name == "works" else ()
                text = "" if commands else reason
                flags.append(MegatronFlag(flag, takes, name, text, commands, subject, in_parser))
    return flags
