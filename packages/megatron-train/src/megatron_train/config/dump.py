"""Configurations as YAML: the file in the folder of a run, and the output of --print-config."""

import math
from pathlib import Path
from typing import Any

import yaml

from megatron_train.atomic_write import write_atomically
from megatron_train.config.data import NULL_TOKENIZERS
from megatron_train.config.files import to_yaml
from megatron_train.config.options import Option, options_of
from megatron_train.config.run import RunConfig
from megatron_train.config.run_sections import run_options, sections
from megatron_train.config.values import Values

_COLUMN = 44


def settings_of(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Returns all settings of a run by section, as a file for --config gives them.

    Unset values and degrees that follow from the number of ranks are left out.
    """
    settings: dict[str, dict[str, Any]] = {}
    for section, (_, cls) in sections(config.model.kind, config.selected_extensions).items():
        section_config = config.section_by_name(section)
        options = options_of(cls, section)
        values = {option.name: getattr(section_config, option.name) for option in options}
        settings[section] = {name: value for name, value in values.items() if value is not None}
    if config.data.tokenizer in NULL_TOKENIZERS:  # --vocab-size excludes the end-of-document token
        settings["model"]["vocab_size"] -= 1
    return settings


def write_config(config: RunConfig, path: Path) -> None:
    """Writes all settings of a run to a YAML file that ``--config`` accepts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as temporary:
        temporary.write_text(to_yaml(settings_of(config)), encoding="utf-8")


def format_config(config: RunConfig, values: Values) -> str:
    """Returns all settings as YAML that ``--config`` accepts, with their origins as comments."""
    settings = settings_of(config)
    lines = []
    kind, selected = config.model.kind, config.selected_extensions
    for section in sections(kind, selected):
        lines.append(f"{section}:")
        for option in run_options(kind, selected):
            if option.section == section:
                value = settings[section].get(option.name)
                lines.append(_line(option, value, _origin(option, value, values)))
    return "\n".join(lines) + "\n"


def _line(option: Option, value: Any, origin: str) -> str:
    if isinstance(value, tuple):
        value = list(value)
    shown = yaml.safe_dump([value], default_flow_style=True, width=math.inf, allow_unicode=True)
    text = f"  {option.name}: {shown.strip()[1:-1]}"
    if value is None:
        text = f"  # {option.name}: not set"
    return f"{text:<{_COLUMN}}  # {origin}"


def _origin(option: Option, value: Any, values: Values) -> str:
    if option.key in values.given:
        return values.given[option.key].origin
    return "default" if value in (option.default, None) else "derived"
