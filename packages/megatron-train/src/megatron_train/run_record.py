"""What a checkpoint keeps of the run it is from, and what of it may differ where the run continues.

A record has a part for each of `KINDS`. A run that differs from the record in one of them is
another run, whose losses are not to be compared with those before: it is refused, unless a flag
allows it. The layout, the length of the run, logging and paths are not in the record, since they
may differ. The rates of the optimizer (`optimizer`) are, for a warning.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from megatron_data import Blend, Tokenizer, parse_data_path, read_data_path_changes

from megatron_train.config.data import CONVERSATION_OPTIONS
from megatron_train.config.run import RunConfig
from megatron_train.errors import TrainError
from megatron_train.stored import shown
from megatron_train.tasks.gpt_data import of_conversations

KINDS: Final = ("data", "tokenizer", "seed", "objective")
"""What makes a run this run, beside its model, whose configuration a checkpoint has anyway."""

LOSS_FIELDS: Final = (
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
)
"""Fields of the model's configuration that change losses alone; they are of the objective."""

_ENDS = 1 << 20
"""Bytes at the beginning and at the end of a file that its fingerprint is made from."""

RunRecord = Mapping[str, Any]
"""Plain values, equal on all ranks."""


def run_record(config: RunConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the record of a run; reads the beginnings and ends of its corpora.

    Raises:
        OSError: a corpus on the disk cannot be read.
    """
    training = config.training
    model = config.model.to_dict()
    record: dict[str, Any] = {
        "data": _data(config, tokenizer),
        "tokenizer": {"fingerprint": None if tokenizer is None else tokenizer.fingerprint[:19]},
        "seed": {"seed": training.seed},
        "objective": {
            "eod_mask_loss": config.data.eod_mask_loss,
            "calculate_per_token_loss": training.calculate_per_token_loss,
            "hidden_dropout": training.hidden_dropout,
            "attention_dropout": training.attention_dropout,
            "task": config.task,
            **{name: model[name] for name in LOSS_FIELDS if name in model},
            **_settings_of_task(config),
        },
        "optimizer": {
            "global_batch_size": config.global_batch_size,
            **asdict(config.optimizer),
            **asdict(config.schedule),
        },
    }
    if config.data.sample_order == "compat":  # drawn for all samples of a run at once
        record["length"] = {"samples": config.train_samples}
    return record


def _settings_of_task(config: RunConfig) -> dict[str, Any]:
    """What the sections of the task hold, by ``section.name``."""
    sections = {name: asdict(section) for name, section in config.of_task.items() if name != "fim"}
    return {f"{s}.{name}": value for s, given in sections.items() for name, value in given.items()}


def _data(config: RunConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What the samples are, and their order, apart from the seed."""
    data = config.data
    paths = ["mock"] if data.mock_data else data.data_path or data.train_data_path or ()
    blend = parse_data_path(paths)
    found: dict[str, Any] = {
        "data": list(blend.prefixes),
        "weights": None if blend.weights is None else list(blend.weights),
        "content": [_fingerprint(prefix) for prefix in blend.prefixes],
        "split": data.split if data.data_path else None,
        "seq_length": data.seq_length,
        "order": data.sample_order,
        "reset_position_ids": data.reset_position_ids,
        "reset_attention_mask": data.reset_attention_mask,
        "sft": data.sft,
        "fim": asdict(config.of_task["fim"]) if data.fim_data else None,
        "written": None,
    }
    if writer := of_conversations(config, tokenizer):
        given = data.tokenizer_settings
        named = {name: given[name] for name in CONVERSATION_OPTIONS if name in given}
        # What a file of a template or the tokenizer's folder holds may change under its name.
        found["written"] = named | {"template": writer.template.fingerprint[:19]}
    if data.data_path_changes:
        changes = read_data_path_changes(data.data_path_changes)
        found["changes"] = [_change(first, parse_data_path(words)) for first, words in changes]
    return found


def _change(first: int, blend: Blend) -> list[Any]:
    """Record that ``blend`` takes the place of the data from sample ``first`` on."""
    return [first, list(blend), [_fingerprint(prefix) for prefix in blend.prefixes]]


def _fingerprint(prefix: str) -> str | None:
    """Digest of the sizes and ends of the files of a corpus; None for one at a URL.

    A corpus is known by it wherever it lies; one at a URL is known by its URL. A corpus of the same
    sizes that was changed in its middle alone passes: reading all of it would take hours.
    """
    digest = hashlib.sha256()
    files = [Path(f"{prefix}{end}") for end in (".idx", ".bin", "")]
    for path in (path for path in files if path.is_file()):
        with path.open("rb") as file:
            size = file.seek(0, 2)
            digest.update(f"{path.suffix} {size} ".encode())
            for start in (0, max(0, size - _ENDS)):
                file.seek(start)
                digest.update(file.read(_ENDS))
    return None if digest.digest() == hashlib.sha256().digest() else digest.hexdigest()[:16]


def upgraded(record: RunRecord) -> RunRecord:
    """Return a record in its present form.

    Records once were flat (`{"data": ["corpus"], "seed": 1, "seq_length": 8, …}`). Of such a one
    only the seed is kept: its other parts count as not recorded.
    """
    if "seq_length" not in record or isinstance(record.get("data"), Mapping):
        return record
    seed = record.get("seed")
    return {"seed": {"seed": seed}} if type(seed) is int else {}


def changes_since(
    there: RunRecord,
    here: RunRecord,
    path: Path,
    consumed_samples: int,
    allowed: Collection[str],
) -> dict[str, str]:
    """Return in what a run differs from the record in a checkpoint, by kind, with both values.

    Keys that only one of the records has are not compared: versions differ in what they record.

    Args:
        there: the record of the checkpoint, as `upgraded` returns it.
        here: the record of the run that continues.
        path: of the checkpoint.
        consumed_samples: by the checkpoint; changes of the data from later samples on may differ.
        allowed: kinds that may differ.

    Raises:
        TrainError: another kind differs, or the record is damaged.
    """
    found = {}
    for kind in (*KINDS, "optimizer", "length"):
        if kind not in there or kind not in here:
            continue
        before, now = _part(there, kind, path), dict(here[kind])
        if kind == "data":
            _leave_out_what_may_differ(before, now, path, consumed_samples)
        shared = before.keys() & now.keys()
        before = {key: value for key, value in before.items() if key in shared}
        if changed := differing(before, {key: now[key] for key in before}):
            found[kind] = changed
    for kind in KINDS:
        if kind in found and kind not in allowed:
            raise TrainError(_refusal(kind, found[kind], there, here, path))
    return found


def _part(record: RunRecord, kind: str, path: Path) -> dict[str, Any]:
    part = record[kind]
    if not isinstance(part, dict):
        raise TrainError(f"{path} is damaged: its record of the run has {kind} {part!r}")
    return dict(part)


def _leave_out_what_may_differ(
    before: dict[str, Any], now: dict[str, Any], path: Path, consumed_samples: int
) -> None:
    """Drop the paths of equal corpora, and the changes of data that lie ahead."""
    known = _sources(now)
    if known is not None and _sources(before) == known:
        for part in (before, now):
            part.pop("data", None)
            part.pop("content", None)
    elif before.get("data") != now.get("data"):  # then the paths say it better
        before.pop("content", None)
        now.pop("content", None)
    for part in (before, now):
        part["changes"] = _changes_before(consumed_samples, part.get("changes") or [], path)
    if len(before["changes"]) == len(now["changes"]) and all(
        map(_same_change, before["changes"], now["changes"])
    ):
        before["changes"] = now["changes"]


def _sources(data: Mapping[str, Any]) -> list[Any] | None:
    """Return what each corpus of a blend is known by: its content, or its path without one."""
    paths, content = data.get("data"), data.get("content")
    if not (isinstance(paths, list) and isinstance(content, list) and len(paths) == len(content)):
        return None
    return [known or path for path, known in zip(paths, content, strict=True)]


def _changes_before(consumed_samples: int, changes: Any, path: Path) -> list[Any]:
    """Return the changes of data that are not ahead; those of older records have no content.

    Raises:
        TrainError: the record is damaged.
    """
    found = []
    for change in changes if isinstance(changes, list) else [changes]:
        match change:
            case [int(first), [list() | tuple(), _], *content] if len(content) <= 1:
                if first < consumed_samples:
                    found.append(change)
            case _:
                raise TrainError(
                    f"{path} is damaged: its record of the run has the change of data "
                    f"{shown(change)}"
                )
    return found


def _same_change(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Whether two changes of data mean the same, wherever their corpora lie."""
    (first, (paths, weights), *content), (then, (others, theirs), *their_content) = before, now
    if first != then or _listed(weights) != _listed(theirs):
        return False
    if not content or not their_content:
        return list(paths) == list(others)
    known = _sources({"data": list(paths), "content": content[0]})
    return known is not None and known == _sources(
        {"data": list(others), "content": their_content[0]}
    )


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _refusal(kind: str, changed: str, there: RunRecord, here: RunRecord, path: Path) -> str:
    if kind == "seed":
        return (
            f"{path} comes from --seed {there[kind].get('seed')}, and this run has --seed "
            f"{here[kind].get('seed')}; give the former, or --no-load-rng to go on with the new one"
        )
    later = "--data-path-changes to replace data from a sample on, or " if kind == "data" else ""
    other = "other data" if kind == "data" else f"another {kind}"
    return (
        f"{path} comes from a run with {other}: {changed}; give the former, {later}"
        f"--allow-changed-run {kind} to go on with the new"
    )


def differing(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Say in which keys two mappings differ, with both values; empty if in none."""
    keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    return ", ".join(f"{key} {there.get(key)} there, {here.get(key)} here" for key in keys)
