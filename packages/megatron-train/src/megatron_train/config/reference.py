"""The configuration reference (docs/configuration.md), generated from the dataclasses."""

from megatron_train.config.flags import ALIASES, LAYERS_PER_VIRTUAL_STAGE
from megatron_train.config.options import Option
from megatron_train.config.run_sections import run_options, sections

_INTRODUCTION = """\
# Configuration reference

All settings of `megatron-train pretrain gpt`. `megatron_train.config.reference` generates this
page from the configuration dataclasses, and a test checks that it is up to date.

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
    ours = {name for name, (_, cls) in sections().items() if cls.__module__.startswith("megatron_")}
    return tuple(option for option in run_options() if option.section in ours)


def render_reference() -> str:
    """Returns the page as Markdown text."""
    parts = [_INTRODUCTION]
    options = documented_options()
    for section, title in {
        option.section: sections()[option.section][0] for option in options
    }.items():
        rows = [_row(option) for option in options if option.section == section]
        head = "| flag | YAML key | takes | default | meaning |\n|---|---|---|---|---|\n"
        parts.append(f"## {title.capitalize()}: `{section}`\n\n{head}" + "\n".join(rows) + "\n")
    rows = [f"| `{flag}` | {alias.help} |" for flag, alias in ALIASES.items()]
    rows.append(
        f"| `{LAYERS_PER_VIRTUAL_STAGE}` | sets `--num-virtual-stages-per-pipeline-rank` to "
        "layers / (pipeline ranks x this) |"
    )
    parts.append("## Other spellings\n\n| flag | meaning |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _row(option: Option) -> str:
    flag = f"`{option.flag}`"
    if option.opposite:
        flag += f" / `{option.opposite}`"
    takes = ", ".join(f"`{choice}`" for choice in option.choices) or option.kind
    if option.unit:
        takes += f" ({option.unit})"
    if option.repeated:
        takes += ", one or more"
    return f"| {flag} | `{option.name}` | {takes} | {_default(option)} | {_cell(option.help)} |"


def _default(option: Option) -> str:
    if option.derived_default:
        return option.derived_default
    if option.required:
        return "required"
    if option.kind == "switch":
        return "on" if option.default else "off"
    return "" if option.default in (None, "") else f"`{option.default_text}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
