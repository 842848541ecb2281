"""The configuration reference (docs/configuration.md), generated from the dataclasses."""

from collections.abc import Collection, Iterator
from typing import Any, Final

from megatron_models import find_kind, model_kinds

from megatron_train.config.aliases import ALIASES
from megatron_train.config.extensions import SelectedExtensions, default_task, tasks_for
from megatron_train.config.flags import LAYERS_PER_VIRTUAL_STAGE
from megatron_train.config.options import Option
from megatron_train.config.run_sections import run_options, sections
from megatron_train.tasks.kinds import find_task_kind

_OURS: Final = "megatron_"
"""Beginning of the names of this project's packages."""

_INTRODUCTION = """\
# Configuration reference

All settings of `megatron-train pretrain gpt`, then those that [other commands](#other-commands)
add. `megatron_train.config.reference` generates this page from the configuration dataclasses, and a
test checks that it is up to date.

Give a setting as a flag, or in its section of a YAML file named by `--config`:

```yaml
model:
  num_layers: 4
training:
  micro_batch_size: 8
```

Flags override the file, the file overrides [`--recipe`](recipes.md), and the recipe overrides the
defaults. An unknown flag or key is an error that names the nearest known one. Each switch has a
second flag for the other value, so that a flag can override a file. See also the
[table of Megatron-LM's flags](megatron-flags.md).
"""


def documented_options() -> tuple[Option, ...]:
    """Returns the options on the page: those of this project's own distributions."""
    ours = {name for name, (_, cls) in sections().items() if _is_ours(cls)}
    return tuple(option for option in run_options() if option.section in ours)


def render_reference() -> str:
    """Returns the page as Markdown text."""
    parts = [_INTRODUCTION]
    options = documented_options()
    for section, title in {
        option.section: sections()[option.section][0] for option in options
    }.items():
        rows = [_row(option, option.name) for option in options if option.section == section]
        head = "| flag | YAML key | takes | default | meaning |\n|---|---|---|---|---|\n"
        parts.append(f"## {title.capitalize()}: `{section}`\n\n{head}" + "\n".join(rows) + "\n")
    rows = [f"| `{flag}` | {alias.help} |" for flag, alias in ALIASES.items()]
    rows.append(
        f"| `{LAYERS_PER_VIRTUAL_STAGE}` | sets `--num-virtual-stages-per-pipeline-rank` to "
        "layers / (pipeline ranks x this) |"
    )
    parts.append("## Other spellings\n\n| flag | meaning |\n|---|---|\n" + "\n".join(rows) + "\n")
    parts.append("## Other commands\n\nFlags that `pretrain gpt` does not have.\n")
    known = {option.flag for option in options}
    for kind in model_kinds():
        parts += _further(kind, known)
    return "\n".join(parts)


def _further(kind: str, known: Collection[str]) -> Iterator[str]:
    """Yields a table for each of our tasks of one of our kinds, with the flags not in ``known``."""
    if not _is_ours(find_kind(kind).config):
        return
    for task in tasks_for(kind):
        selected = SelectedExtensions(task)
        found = sections(kind, selected)
        own = find_task_kind(task).task.startswith(_OURS)
        rows = [
            _row(option, option.key)
            for option in run_options(kind, selected)
            if own and option.flag not in known and _is_ours(found[option.section][1])
        ]
        is_default = task == default_task(kind)
        command = f"pretrain {kind}" if is_default else f"pretrain {kind} --task {task}"
        if rows:
            head = "| flag | YAML key | takes | default | meaning |\n|---|---|---|---|---|\n"
            yield f"### `{command}`\n\n{head}" + "\n".join(rows) + "\n"


def _is_ours(cls: type[Any]) -> bool:
    return cls.__module__.startswith(_OURS)


def _row(option: Option, key: str) -> str:
    flag = f"`{option.flag}`"
    if option.opposite:
        flag += f" / `{option.opposite}`"
    takes = ", ".join(f"`{choice}`" for choice in option.choices) or option.kind
    notes = ", ".join(filter(None, (option.unit, option.bounds)))
    if notes:
        takes += f" ({notes})"
    if option.repeated:
        takes += ", one or more"
    return f"| {flag} | `{key}` | {takes} | {_default(option)} | {_cell(option.help)} |"


def _default(option: Option) -> str:
    if option.derived_default:
        return option.derived_default
    if option.required:
        return "required"
    if option.kind == "switch":
        return "on" if option.default else "off"
    return "" if option.default in (None, "", ()) else f"`{option.default_text}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
