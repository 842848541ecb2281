"""Renders the page docs/megatron-flags.md from the table of flags."""

from collections import Counter
from collections.abc import Sequence

from megatron_train.megatron_lm.table import STATUSES, MegatronFlag, megatron_flags

COMMIT = "d98e8a64"
"""Commit of Megatron-LM whose argument parser the table was compared with."""

_INTRODUCTION = f"""\
# Flags of Megatron-LM

The status of every flag of Megatron-LM's argument parser (repository at {COMMIT}), of its older
versions and of its other programs. This page is generated from the files in
`megatron_train/megatron_lm/flags`. Tests compare them with Megatron-LM's flags and with the flags
that the commands accept. `megatron-train config find WORD` searches the table, and
[`megatron-train config from-megatron`](from-megatron.md) converts whole launch scripts.

- **works**: has the same meaning as in Megatron-LM, in the command that is named
- **alias**: accepted by `megatron-train pretrain gpt`, and translated to another setting
- **no effect**: accepted by `megatron-train pretrain gpt`, which prints a note
- **planned**: an error that names the planned feature
- **refused**: an error with the reason or with the setting to give instead

Values after a flag: `N...` is one or more values, `[N...]` is any number of values, and `{{a}}`
lists the only values that are accepted.

"""


def render_flags() -> str:
    """Returns the page in Markdown."""
    flags = list(megatron_flags().values())
    of_parser = [flag for flag in flags if flag.in_parser]
    parts = [
        _INTRODUCTION + f"Of the {len(of_parser)} flags of the parser: {_counts(of_parser)}.\n"
    ]
    for subject in dict.fromkeys(flag.subject for flag in flags):
        group = [flag for flag in flags if flag.subject == subject]
        head = f"## {subject}\n\n{_counts(group).capitalize()}.\n\n"
        rows = "\n".join(map(_row, sorted(group, key=lambda flag: flag.flag)))
        parts.append(
            f"{head}| flag | status | command, meaning or reason |\n|---|---|---|\n{rows}\n"
        )
    return "\n".join(parts)


def _counts(flags: Sequence[MegatronFlag]) -> str:
    counts = Counter(flag.status for flag in flags)
    return ", ".join(f"{counts[kind]} {kind}" for kind in STATUSES if counts[kind])


def _row(flag: MegatronFlag) -> str:
    where = ", ".join(f"`{command}`" for command in flag.commands) or flag.reason
    takes = f" {flag.metavar}" if flag.metavar else ""
    return f"| `{flag.flag}{takes}` | {flag.status} | {where} |"
