"""What became of Megatron-LM's flags: an answer for whoever gives one, and the page of all.

The facts lie in ``megatron_flags.yaml`` beside this module, and nowhere else.
"""

from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

_FILE = "megatron_flags.yaml"
_KINDS = ("works", "alias", "planned", "refused")


@dataclass(frozen=True)
class MegatronFlag:
    """A flag of Megatron-LM and what became of it.

    Attributes:
        flag: its spelling there.
        kind: ``works``, ``alias``, ``planned`` or ``refused``.
        text: what it is an alias of, what it waits for, or why it is refused.
        commands: the commands that take it, where it works.
        issue: number of the issue that it is planned in, where that is known.
        in_readme: whether Megatron-LM's README names it.
    """

    flag: str
    kind: str
    text: str = ""
    commands: tuple[str, ...] = ()
    issue: int | None = None
    in_readme: bool = True

    def answer(self) -> str:
        """Return one line for somebody who gave this flag to a command that does not take it."""
        if self.kind == "works":
            return f"{self.flag} is a flag of {' and '.join(self.commands)}"
        if self.kind == "alias":
            return f"{self.flag} is a flag of megatron-train pretrain gpt: it {self.text}"
        if self.kind == "planned":
            return f"{self.flag} is not supported yet, it is planned: {self.text}"
        return f"{self.flag} is a flag of Megatron-LM that is not needed here: {self.text}"


def megatron_flags() -> tuple[MegatronFlag, ...]:
    """Return every flag of Megatron-LM that is accounted for, those of its README first."""
    text = resources.files("megatron_train.config").joinpath(_FILE).read_text(encoding="utf-8")
    groups = yaml.safe_load(text)
    return tuple(
        _read(flag, entry, group == "readme")
        for group, entries in groups.items()
        for flag, entry in entries.items()
    )


def find_megatron_flag(flag: str) -> MegatronFlag | None:
    """Return what became of one flag, None where nothing is known of it."""
    return next((known for known in megatron_flags() if known.flag == flag), None)


def _read(flag: str, entry: dict[str, Any], in_readme: bool) -> MegatronFlag:
    kind = next(kind for kind in _KINDS if kind in entry)
    commands = tuple(entry["works"]) if kind == "works" else ()
    text = "" if kind == "works" else entry[kind]
    return MegatronFlag(flag, kind, text, commands, entry.get("issue"), in_readme)


_INTRODUCTION = """\
# Flags of Megatron-LM

What became of every flag that Megatron-LM's README names, and of others in its GPT command lines.
This page is made from `megatron_train/config/megatron_flags.yaml`; tests compare it with what the
commands accept. A flag that is planned or refused is answered with its line of this table.

- **works**: as there, in the command named
- **alias**: accepted, and made into a setting of ours
- **planned**: not there yet; the number is that of the issue where it is
- **refused**: has no use here, or another form

"""


def render_flags() -> str:
    """Return the page docs/megatron-flags.md as Markdown text."""
    flags = megatron_flags()
    counts = {kind: sum(f.kind == kind and f.in_readme for f in flags) for kind in _KINDS}
    total = sum(counts.values())
    summary = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    parts = [_INTRODUCTION + f"Of the {total} flags in the README: {summary}.\n"]
    for title, in_readme in (("In the README", True), ("Others", False)):
        rows = [_row(flag) for flag in flags if flag.in_readme == in_readme]
        head = "| flag | | where, what or why |\n|---|---|---|\n"
        parts.append(f"## {title}\n\n{head}" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _row(flag: MegatronFlag) -> str:
    where = ", ".join(f"`{command}`" for command in flag.commands) or flag.text
    kind = flag.kind if flag.issue is None else f"{flag.kind} ({flag.issue})"
    return f"| `{flag.flag}` | {kind} | {where} |"
