"""The page docs/megatron-flags.md, made from the table of flags."""

from collections import Counter
from collections.abc import Sequence

from megatron_train.megatron_lm.table import STATUSES, MegatronFlag, megatron_flags

COMMIT = "d98e8a64"
"""Commit of Megatron-LM's repository whose argument parser the table was compared with."""

_INTRODUCTION = f"""\
# Flags of Megatron-LM

What became of every flag of Megatron-LM's argument parser (repository at {COMMIT}), of older
versions and of its other programs. This page is made from the files in
`megatron_train/megatron_lm/flags`; tests compare them with Megatron-LM's flags and with what the
commands accept. `megatron-train config find WORD` searches them, and
[`megatron-train config from-megatron`](from-megatron.md) reads whole launch scripts.

- **works**: as there, in the command named
- **alias**: accepted by `megatron-train pretrain gpt`, and made into another setting
- **no effect**: accepted by `megatron-train pretrain gpt`, which says so in one line
- **planned**: an error that names what will bring it
- **refused**: an error that says why, or what to give instead

Values behind a flag: `N...` is one or more, `[N...]` any number, and `{{a}}` the only ones that are
accepted.

"""


def render_flags() -> str:
    """Returns the page as Markdown text."""
    flags = list(megatron_flags().values())
    of_parser = [flag for flag in flags if flag.in_parser]
    parts = [
        _INTRODUCTION + f"Of the {len(of_parser)} flags of the parser: {_counts(of_parser)}.\n"
    ]
    for subject in dict.fromkeys(flag.subject for flag in flags):
        group = [flag for flag in flags if flag.subject == subject]
        head = f"## {subject}\n\n{_counts(group).capitalize()}.\n\n"
        rows = "\n".join(map(_row, sorted(group, key=lambda flag: flag.flag)))
        parts.append(f"{head}| flag | | where, what or why |\n|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def _counts(flags: Sequence[MegatronFlag]) -> str:
    counts = Counter(flag.status for flag in flags)
    return ", ".join(f"{counts[kind]} {kind}" for kind in STATUSES if counts[kind])


def _row(flag: MegatronFlag) -> str:
    where = ", ".join(f"`{command}`" for command in flag.commands) or flag.reason
    takes = f" {flag.metavar}" if flag.metavar else ""
    return f"| `{flag.flag}{takes}` | {flag.status} | {where} |"
