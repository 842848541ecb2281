"""The record of a run in its checkpoints, and its comparison with the run that continues.

A record has the parts `RECORD_PARTS`. If one of them differs, losses are not comparable with those
before, so the run is refused unless a flag allows the difference. Layout, length of the run,
logging and paths may differ and are not recorded. The part ``optimizer`` is recorded for a warning.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from megatron_data import Tokenizer

from megatron_train.config.run import RunConfig
from megatron_train.config.sections import ScheduleConfig
from megatron_train.data_identity import corpora_identity, drop_allowed_differences
from megatron_train.errors import TrainError
from megatron_train.product_record import record_product
from megatron_train.saved_values import describe_differences

RECORD_PARTS: Final = ("data", "tokenizer", "seed", "objective")
"""The parts that identify a run. The model's configuration is recorded elsewhere."""

_SCHEDULE_SETTINGS: Final = {field.name for field in fields(ScheduleConfig)} | {
    *("lr", "min_lr", "decoupled_lr", "decoupled_min_lr"),
    *("lr_warmup_init", "lr_decay_style", "lr_decay_power", "lr_wsd_decay_style"),
    *("weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style"),
}

RunRecord = Mapping[str, Any]
"""The record of a run: plain values, equal on all ranks."""


def run_record(
    config: RunConfig, tokenizer: Tokenizer | None, samples: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the record of a run. Reads the beginnings and ends of its corpora.

    Args:
        config: The run.
        tokenizer: Tokenizer of the run, if any.
        samples: How samples are made of the corpora, see `TaskData.identity`.

    Raises:
        OSError: A local corpus cannot be read.
    """
    record: dict[str, Any] = {
        "data": corpora_identity(config.data) | dict(samples),
        "tokenizer": {"fingerprint": None if tokenizer is None else tokenizer.fingerprint[:19]},
        "seed": {"seed": config.training.seed},
        "objective": _objective(config),
        "optimizer": _optimizer(config),
    }
    if config.data.sample_order == "compat":  # computed for all samples of a run at once
        record["length"] = {"samples": config.train_samples}
    return record


def uses_null_tokenizer(record: RunRecord) -> bool:
    """Returns whether the run's tokenizer adds the end-of-document token to ``--vocab-size``."""
    fingerprint = record.get("tokenizer", {}).get("fingerprint")
    return fingerprint is not None and str(fingerprint).startswith("null")


def _optimizer(config: RunConfig) -> dict[str, Any]:
    """Returns batch sizes, learning rates and settings of the update rule."""
    settings, stepped = asdict(config.optimizer), config.training.step_batch_size_schedule
    own = settings.pop("settings") or {}
    for name, value in settings.items():
        if isinstance(value, tuple):  # a checkpoint has lists
            settings[name] = " ".join(value)
    return {
        "global_batch_size": config.global_batch_size,
        "step_batch_size_schedule": None if stepped is None else " ".join(stepped),
        **settings,
        **asdict(config.schedule),
        **{f"{config.optimizer.optimizer}.{name}": value for name, value in own.items()},
    }


def without_schedules(record: RunRecord) -> RunRecord:
    """Returns a record without the settings of the schedules of learning rate and weight decay."""
    kept = record.get("optimizer", {}).items()
    return {**record, "optimizer": {n: v for n, v in kept if n not in _SCHEDULE_SETTINGS}}


def recorded_rule(record: object) -> str:
    """Returns the name of the update rule in a record of a run; empty if it has none."""
    part = record.get("optimizer") if isinstance(record, Mapping) else None
    name = part.get("optimizer") if isinstance(part, Mapping) else None
    return name if isinstance(name, str) else ""


def _objective_fields(section: Any) -> dict[str, Any]:
    """Returns the values of the fields whose metadata have ``objective``, by name."""
    names = [field.name for field in fields(section) if field.metadata.get("objective")]
    return {name: getattr(section, name) for name in names}


def _objective(config: RunConfig) -> dict[str, Any]:
    """Returns the settings that define the losses."""
    training = config.training
    found: dict[str, Any] = {
        "task": config.task,
        "eod_mask_loss": config.data.eod_mask_loss,
        "calculate_per_token_loss": training.calculate_per_token_loss,
        "hidden_dropout": training.hidden_dropout,
        "attention_dropout": training.attention_dropout,
        **_objective_fields(config.model),
        **record_product(config),
    }
    for name, section in config.extension_settings.items():
        marked = _objective_fields(section)
        found |= {f"{name}.{field}": value for field, value in marked.items()}
    return found


def upgrade_record(record: RunRecord) -> RunRecord:
    """Returns a record in the present format.

    Older records are flat: `{"data": ["corpus"], "seed": 1, "seq_length": 8, …}`. Only their seed
    is used; the other parts count as not recorded.
    """
    if "seq_length" not in record or isinstance(record.get("data"), Mapping):
        return record
    seed = record.get("seed")
    return {"seed": {"seed": seed}} if type(seed) is int else {}


def compare_records(
    saved: RunRecord,
    current: RunRecord,
    path: Path,
    consumed_samples: int,
    allowed: Collection[str],
) -> dict[str, str]:
    """Returns the differences between two records by part, with both values.

    Keys that only one of the records has are not compared, since versions record different keys.

    Args:
        saved: Record of the checkpoint, as returned by `upgrade_record`.
        current: Record of the run that continues.
        path: Path of the checkpoint.
        consumed_samples: Samples consumed by the checkpoint. Changes of data after them may differ.
        allowed: Parts that may differ.

    Raises:
        TrainError: Another part differs, or the record is damaged.
    """
    found = {}
    for kind in (*RECORD_PARTS, "optimizer", "length"):
        if kind not in saved or kind not in current:
            continue
        before, now = _part(saved, kind, path), dict(current[kind])
        if kind == "data":
            drop_allowed_differences(before, now, path, consumed_samples)
        shared = before.keys() & now.keys()
        before = {key: value for key, value in before.items() if key in shared}
        if changed := describe_differences(before, {key: now[key] for key in before}):
            found[kind] = changed
    for kind in RECORD_PARTS:
        if kind in found and kind not in allowed:
            raise TrainError(_refusal(kind, found[kind], saved, current, path))
    return found


def _part(record: RunRecord, kind: str, path: Path) -> dict[str, Any]:
    part = record[kind]
    if not isinstance(part, dict):
        raise TrainError(f"{path} is damaged: its record of the run has {kind} {part!r}")
    return dict(part)


def _refusal(kind: str, changed: str, saved: RunRecord, current: RunRecord, path: Path) -> str:
    if kind == "seed":
        return (
            f"{path} was saved with --seed {saved[kind].get('seed')}, but this run has --seed "
            f"{current[kind].get('seed')}; give the seed of the checkpoint, or --no-load-rng to "
            "continue with the new one"
        )
    later = "--data-path-changes to replace data from a sample on, or " if kind == "data" else "or "
    other = "other data" if kind == "data" else f"another {kind}"
    return (
        f"{path} was saved by a run with {other}: {changed}; give that of the checkpoint, {later}"
        f"--allow-changed-run {kind} to continue with the new one"
    )
