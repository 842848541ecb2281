"""The page of each family in the documentation, generated from the family itself."""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from megatron_models.families.family import Family, Row
from megatron_models.families.settings import (
    REQUIRED,
    Constant,
    Derived,
    Mapped,
    Setting,
    Translated,
    Unused,
)
from megatron_models.kinds import find_kind

from families.real import REAL_MODELS

DISTRIBUTION = "megatron-models"

_CONVERT = """\
## Commands

A folder with `config.json` and safetensors is read without a conversion. A checkpoint is the start
of a training.

```console
{generate}$ megatron-ckpt convert --from-hf {name}-hf runs/{name}
{train}$ megatron-ckpt convert --to-hf runs/{name} {name}-exported --family {name}
```
"""
_GENERATE = """\
$ megatron-infer generate --load {name}-hf --prompt "Once upon a time"
"""
_TRAIN = """\
$ megatron-train finetune gpt --pretrained-checkpoint runs/{name} --seq-length 256 \\
    --micro-batch-size 8 --train-iters 100 --data-path talks --save runs/{name}-talks
"""

_REFUSED = """\
## What is refused

A `config.json` with another value in a field above, or with a field that is not listed here, is
refused with the field and its value: forks of a model keep the name of its architecture, and
weights alone do not show such a change. Null is no value. Fields that never have an effect, such as
token ids and settings of generation, and further fields with their neutral values are the same for
all families (`megatron_models.families.neutral`).

A model that was trained here is refused on export if a field of its configuration that the table
does not list has another value than its default. The message names the field.
"""


def pages() -> dict[str, Callable[[], str]]:
    """Returns the text of the page of each family of megatron-models, by path in the repository."""
    found = {}
    for entry in sorted(entry_points(group="megatron.families")):
        if entry.dist is not None and entry.dist.name == DISTRIBUTION:
            family: Family = entry.load()
            about = inspect.getdoc(sys.modules[entry.module]) or ""
            found[f"docs/families/{family.name}.md"] = partial(page, family, about)
    return found


def page(family: Family, about: str) -> str:
    """Returns the page of a family; ``about`` is the docstring of its module."""
    names = ", ".join(f"`{name}`" for name in family.architectures)
    parts = [
        f"# {family.title}\n",
        about.replace("``", "`") + "\n",
        f"The family `{family.name}` reads {names} (`model_type` is `{family.model_type}`).\n"
        "[The table of families](../families.md) shows how it is proven.\n",
        *_real(family),
        _commands(family),
        _settings(family),
        *_fixed(family),
        _REFUSED,
        _tensors(family),
    ]
    return "\n".join(parts)


def _commands(family: Family) -> str:
    """Returns the commands that apply to the family's kind of model."""
    kind, name = find_kind(family.kind), family.name
    generate = _GENERATE.format(name=name) if kind.supports_decoding else ""
    train = _TRAIN.format(name=name) if kind.default_task == "gpt" else ""
    return _CONVERT.format(name=name, generate=generate, train=train)


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Returns a table in Markdown."""
    lines = [header, ("---",) * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _real(family: Family) -> Iterator[str]:
    model = REAL_MODELS.get(family.name)
    if model is not None:
        names = [f"`{name}`" for name in model.requirements]
        noun = "the package" if len(names) == 1 else "the packages"
        yield (
            f"**Real weights**: {model.title} ({model.license}), a GGUF file in {noun}\n"
            f"{', '.join(names)}, generates the greedy\ntext of `transformers` on one rank and on "
            "several (`integration_tests/parity/test_real_models.py`).\n"
        )


def _settings(family: Family) -> str:
    config = find_kind(family.kind).config
    flags = {entry.name: entry.metadata.get("flag") for entry in dataclasses.fields(config)}

    def ours(name: str) -> str:
        return f"`{name}` (`{flags[name]}`)" if flags.get(name) else f"`{name}`"

    rows = [
        (_code(*setting.hf_fields), ours(name), _meaning(setting))
        for name, setting in family.settings.items()
    ]
    rows += [
        (_code(*rule.hf_fields), ", ".join(map(ours, rule.fields)), "converted together")
        for rule in family.custom
    ]
    return "## Settings\n\n" + table(("`config.json`", "our field (flag)", "values"), rows)


def _meaning(setting: Setting) -> str:
    """Returns the values that a setting accepts, and the one of a missing field."""
    if isinstance(setting, Mapped):
        if setting.absent is REQUIRED:
            return "the same; required"
        derived = setting.absent == 0 and setting.absent is not False
        shown = "derived" if derived else _value(setting.absent)
        return f"the same; {shown} if missing"
    if isinstance(setting, Translated):
        pairs = ", ".join(f"{_value(theirs)}: {_value(ours)}" for theirs, ours in setting.pairs)
        return f"{pairs}; {_value(setting.absent)} if missing"
    if isinstance(setting, Constant):
        return f"always {_value(setting.value)}"
    if isinstance(setting, Derived):
        return "always derived from other fields"
    assert isinstance(setting, Unused)
    return "not used by the family"


def _fixed(family: Family) -> Iterator[str]:
    rows = [(_code(name), " or ".join(map(_value, v))) for name, v in family.neutral.items()]
    if rows:
        yield "These fields are accepted with the values that have no effect:\n"
        yield table(("`config.json`", "accepted"), rows)
    for name, fields in family.if_absent.items():
        shown = ", ".join(f"`{key}` = {_value(value)}" for key, value in fields.items())
        yield f"A file without any `{name}` is read with {shown}.\n"
    if family.former_endings:
        shown = ", ".join(f"`{old}` = `{new}`" for old, new in family.former_endings.items())
        yield f"Older files have these endings of names: {shown}.\n"
    if family.without_effect:
        yield f"These have no effect with any value: {_code(*sorted(family.without_effect))}.\n"
    if family.published_code:
        yield (
            "Code that `auto_map` names is not loaded. These entries are accepted: "
            f"{_code(*(f'{name}: {code}' for name, code in family.published_code.items()))}.\n"
        )
    if family.exported_constants:
        shown = (f"`{name}` = {_value(v)}" for name, v in family.exported_constants.items())
        yield f"An exported `config.json` also has {', '.join(shown)}.\n"


def _tensors(family: Family) -> str:
    rows = [
        (_code(*_tuple(row[0])), "<br>".join(map(_code, row[1])), _operations(row), _where(row))
        for row in family.rows
    ]
    text = (
        "## Tensors\n\nOperations are applied from left to right on import, from right to left on "
        "export.\n`{i}` is the number of a layer, `{e}` that of an expert.\n\n"
    )
    if any("{m}" in name for row in family.rows for name in row[1]):
        text += (
            "`{m}` is a depth of multi-token prediction in our names, from 0 on. In the file it is "
            "the number of its layer,\nafter the layers of the model.\n\n"
        )
    text += table(("our parameter", "tensor in the file", "operations", "only if"), rows)
    if family.ignored:
        names = "".join(f"- `{name}`: {check}\n" for name, check, _ in family.ignored)
        text += f"\nThese tensors are skipped after a check of their content:\n\n{names}"
    return text


def _operations(row: Row) -> str:
    return "<br>".join(
        f"`{name}({', '.join(f'{key}={_plain(value)}' for key, value in arguments.items())})`"
        for name, arguments in row[2]
    )


def _where(row: Row) -> str:
    where: Mapping[str, Any] = row[3] if len(row) == 4 else {}
    words = {"if": "", "unless": "not "}
    return ", ".join(f"{words.get(key, key + ' ')}`{_plain(v)}`" for key, v in where.items())


def _plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    return str(value).removeprefix("$")


def _value(value: object) -> str:
    shown = {None: "null", True: "true", False: "false"}.get(value) if _hashable(value) else None
    return f"`{shown if isinstance(value, bool | None) else value}`"


def _hashable(value: object) -> bool:
    return not isinstance(value, dict | list)


def _tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _code(*names: str) -> str:
    return ", ".join(f"`{name}`" for name in names)
