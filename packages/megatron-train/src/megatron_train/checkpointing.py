"""Continues from checkpoints, or begins with the weights of one. `saving` describes them."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

from megatron_ckpt import (
    Checkpoint,
    CheckpointStore,
    ModelRecord,
    View,
    find_checkpoint,
    map_reduce,
)
from megatron_models import AMAX_HISTORY, config_of, head_fields, new_head_parameters
from megatron_optim import AVERAGE_SUFFIX, MAIN_SUFFIX, OptimError
from megatron_parallel.tensor_parallel import added_parameter_names

from megatron_train.config.checkpoint import ScheduleChoice
from megatron_train.config.products import PLAIN
from megatron_train.errors import TrainError
from megatron_train.mesh_coordinator import coordinator_of
from megatron_train.metrics.console import Console
from megatron_train.product_record import (
    recorded_product,
    refuse_other_product,
    refuse_other_tensors,
)
from megatron_train.run_record import (
    RECORD_PARTS,
    RunRecord,
    compare_records,
    recorded_rule,
    upgrade_record,
    uses_null_tokenizer,
    without_schedules,
)
from megatron_train.saved_values import describe_differences, read_value
from megatron_train.saving import SavedCheckpoint, views_of
from megatron_train.schedule_changes import schedule_changes
from megatron_train.schedule_lengths import settle_schedules
from megatron_train.trainer import Trainer

_CHECKPOINT = re.compile(r"iter_\d{7,}")


@dataclass(frozen=True)
class _CheckpointInfo:
    """The checkpoint to continue from, as found by rank 0."""

    iteration: int
    path: Path
    model: ModelRecord | None
    continues: bool
    """Whether it has the position of a run, and not only weights."""
    optimizer_state: Sequence[str]
    """Names of the optimizer's state tensors of a parameter, and of main parameters."""
    product: str
    """Name of the product of its linear layers."""
    rule: str
    """Name of its update rule; empty if it is not recorded."""
    histories: Mapping[str, list[int]]
    """Global shapes of the histories of magnitudes of delayed scaling, by name."""

    def to_plain(self) -> dict[str, Any]:
        """Returns plain values to send to other ranks."""
        return {**asdict(self), "path": str(self.path)}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Self:
        """Returns the object that `to_plain` was called on."""
        model = None if plain["model"] is None else ModelRecord(**plain["model"])
        return cls(**{**plain, "path": Path(plain["path"]), "model": model})


def restore(
    trainer: Trainer,
    folder: Path,
    run: RunRecord,
    console: Console,
    *,
    load_optimizer: bool = True,
    schedules: ScheduleChoice = "unchanged",
    allowed_changes: Collection[str] = (),
) -> SavedCheckpoint | None:
    """Continues from the newest complete checkpoint in ``folder``.

    The checkpoint may have been saved by any number of ranks in any layout. One warning names
    incomplete checkpoints.

    Args:
        trainer: Trainer that continues.
        folder: Folder of checkpoints, or one checkpoint.
        run: Record of the run that continues. A warning names allowed differences.
        console: Console that warnings are printed to.
        load_optimizer: Whether to load the optimizer's state, instead of beginning with a new one.
        schedules: Which schedules of learning rate and weight decay the run continues with.
        allowed_changes: Parts of the record (`RECORD_PARTS` of `run_record`) that may differ.

    Returns:
        The checkpoint; None if the folder has none.

    Raises:
        TrainError: The checkpoint is of another model or of a run with differences that are not
            allowed; the message names the differences.
        CheckpointError: ``folder`` is an incomplete checkpoint, or the checkpoint cannot be read.
    """
    store, is_single = _store_of(trainer, folder)

    def find(added: list[dict[str, list[int]]]) -> dict[str, Any] | None:
        newest = _find(store, folder, is_single, console)
        if newest is not None and newest.continues:
            refuse_other_product(newest.product, run, newest.path)
            refuse_other_tensors(
                Checkpoint(newest.path),
                {name: shape for each in added for name, shape in each.items()},
                run,
            )
        return None if newest is None else newest.to_plain()

    plain = map_reduce(store.coordinator, lambda: _added_shapes(trainer), find)
    if plain is None:
        return None
    found = _CheckpointInfo.from_plain(plain)
    refuse_other_model(trainer, run, found.model, found.path, ignored=run.get("objective", ()))
    if not found.continues:
        raise TrainError(
            f"{found.path} has weights but no run to continue; begin a new run with them with "
            "--finetune and another --save folder"
        )
    iteration = found.iteration if is_single else None
    has_averages = AVERAGE_SUFFIX in found.optimizer_state
    state: Any
    if load_optimizer:
        _refuse_other_rule(trainer, found)
        views, unused = views_of(trainer), set[str]()
        if trainer.averages is None and has_averages:
            unused = {f"{name}.{AVERAGE_SUFFIX}" for name in trainer.engine.stages.table}
            console.warn(f"{found.path} has averages of weights, which end here: no --ema-decay")
        elif trainer.averages is not None and not has_averages:
            views = {n: v for n, v in views.items() if not n.endswith(f".{AVERAGE_SUFFIX}")}
            console.warn(f"{found.path} has no averages of weights: they begin with its weights")
        unused |= _match_histories(views, found, console)
        state = store.load(iteration, views, unused=unused)
    else:
        state = store.load(iteration, _weights_of(trainer), groups=["model"], cast="floating")
        trainer.optimizer.reload_model_parameters()
    path = state.checkpoint.path

    def take() -> None:
        try:
            if load_optimizer:
                saved, names = read_value(state, "optimizer", dict), trainer.optimizer.scalars()
                trainer.optimizer.load_scalars(
                    {n: read_value(saved, n, type(value)) for n, value in names.items()}
                )
            if trainer.averages is not None and not (load_optimizer and has_averages):
                trainer.averages.reset()
            position = read_value(state, "trainer", dict)
            trainer.load_state(position)
            if schedules == "checkpoint":
                trainer.load_schedules(position)
        except (TrainError, OptimError) as error:
            raise TrainError(f"{path}: {error}; load another checkpoint") from None

    # Only rank 0 has all callbacks, so it may be the only one that finds damaged state.
    map_reduce(store.coordinator, take, lambda _: None)
    shown = run if schedules in ("unchanged", "override") else without_schedules(run)
    changes = _compare(state.get("run"), shown, trainer, path, allowed_changes, console)
    if schedules != "checkpoint" and trainer.iteration < trainer.train_iters:
        try:
            jumps = settle_schedules(trainer, read_value(state, "trainer", dict), schedules)
        except TrainError as error:
            raise TrainError(f"{path}: {error}") from None
        for line in jumps:
            console.warn(line)
    changed = "" if "optimizer" in changes else schedule_changes(state.get("trainer"), trainer)
    if changed and schedules in ("unchanged", "override"):
        console.warn(
            f"schedules differ from those before step {trainer.iteration}, which the run had from "
            f"an earlier checkpoint: {changed}; --use-checkpoint-opt-param-scheduler continues "
            "with them"
        )
    return SavedCheckpoint(path, trainer.iteration)


def _match_histories(
    views: dict[str, list[View]], found: _CheckpointInfo, console: Console
) -> set[str]:
    """Drops the views of histories of magnitudes that a checkpoint does not have.

    Returns:
        Names of the histories of the checkpoint that the run does not have.
    """
    here = {n: list(v[0].global_shape) for n, v in views.items() if n.endswith(f".{AMAX_HISTORY}")}
    fits = {name for name, shape in here.items() if found.histories.get(name) == shape}
    for name in here.keys() - fits:
        del views[name]
    if here.keys() - fits:
        console.warn(
            f"{found.path} has no history of magnitudes of this run's --fp8-recipe delayed for "
            f"{len(here) - len(fits)} of {len(here)} weights: it begins anew"
        )
    return found.histories.keys() - fits


def _compare(
    saved: Any,
    current: RunRecord,
    trainer: Trainer,
    path: Path,
    allowed: Collection[str],
    console: Console,
) -> Mapping[str, str]:
    """Refuses a run that differs from the checkpoint's; returns allowed changes, and warns."""
    if not isinstance(saved, Mapping):
        raise TrainError(f"{path} is damaged: its record of the run is {saved!r}")
    saved = upgrade_record(saved)
    changes = compare_records(saved, current, path, trainer.consumed_samples, allowed)
    if unknown := [kind for kind in RECORD_PARTS if kind in current and kind not in saved]:
        console.warn(
            f"{path} has no record of its {', '.join(unknown)}, so changes cannot be detected"
        )
    step = trainer.iteration
    order = ", ".join(changes[kind] for kind in ("data", "seed", "length") if kind in changes)
    if order:
        depends = "data and seed; use --data-path-changes to replace data from a sample on"
        if "length" in changes:
            depends = (
                "data, seed and, in Megatron's order, the number of samples of the whole run "
                "(steps times --global-batch-size)"
            )
        console.warn(
            f"the order of samples differs from that before step {step}, so some samples may be "
            f"repeated and others skipped: {order}; the order depends on {depends}"
        )
    for kind, what in (
        ("tokenizer", "the tokenizer differs from that"),
        ("objective", "losses are not comparable with those"),
        ("optimizer", "settings of the optimizer differ from those"),
    ):
        if kind in changes:
            console.warn(f"{what} before step {step}: {changes[kind]}")
    return changes


def load_weights(trainer: Trainer, folder: Path, run: RunRecord) -> tuple[int, list[str]]:
    """Loads only the weights of the newest complete checkpoint in ``folder``, or of ``folder``.

    Weights are converted to the floating-point type of the model. Parameters that products of
    linear layers add, such as adapters, keep their initial values if the checkpoint has none, and
    so do those of heads that the checkpoint's model does not have.

    Args:
        trainer: Trainer that begins.
        folder: Folder of checkpoints, or one checkpoint.
        run: Record of the run that begins. Settings of its objective may differ.

    Returns:
        The number of steps after which the checkpoint was saved, and the names of the parameters of
        heads that keep their initial values.

    Raises:
        TrainError: The checkpoint is of another model; the message names the differing fields.
        CheckpointError: There is no checkpoint, or it cannot be read.
    """
    store, is_single = _store_of(trainer, folder)

    def find(added: list[dict[str, list[int]]]) -> tuple[dict[str, Any], list[str]]:
        checkpoint = find_checkpoint(folder)
        newest = _info_of(checkpoint)
        if newest.product != PLAIN:
            refuse_other_product(newest.product, run, newest.path)
        return newest.to_plain(), sorted({*chain(*added)} - {*checkpoint.tensors})

    plain, absent = map_reduce(store.coordinator, lambda: _added_shapes(trainer), find)
    found = _CheckpointInfo.from_plain(plain)
    own = config_of(trainer.task.model_record)
    ignored = ("init_method_std", *run.get("objective", ()), *head_fields(type(own)))
    refuse_other_model(trainer, run, found.model, found.path, ignored=ignored)
    source = own if found.model is None else config_of(found.model)
    new = new_head_parameters(own, source)
    unused = {*new} | (source.parameters().keys() - own.parameters().keys())
    iteration = found.iteration if is_single else None
    weights = _weights_of(trainer)
    for name in weights.keys() & {*absent, *new}:
        del weights[name]
    store.load(iteration, weights, groups=["model"], unused=unused, cast="floating")
    trainer.optimizer.reload_model_parameters()
    if trainer.averages is not None:
        trainer.averages.reset()
    return found.iteration, new


def is_checkpoint(folder: Path) -> bool:
    """Returns whether ``folder`` has the name of one checkpoint, not of a folder of several."""
    return _CHECKPOINT.fullmatch(folder.name) is not None and folder.is_dir()


def _store_of(trainer: Trainer, folder: Path) -> tuple[CheckpointStore, bool]:
    """Returns the store of a folder, and whether the folder is one checkpoint in the store."""
    is_single = is_checkpoint(folder)
    parent = folder.parent if is_single else folder
    return CheckpointStore(parent, coordinator_of(trainer.engine.mesh)), is_single


def _find(
    store: CheckpointStore, folder: Path, is_single: bool, console: Console
) -> _CheckpointInfo | None:
    if is_single:
        checkpoint = Checkpoint(folder)
        return _info_of(checkpoint)
    newest = store.latest_checkpoint()
    if newest is None:
        if unfinished := store.find_latest()[1]:
            console.warn("; ".join(str(candidate.error) for candidate in unfinished))
        return None
    return _info_of(newest)


def _info_of(checkpoint: Checkpoint) -> _CheckpointInfo:
    names = (name for name, record in checkpoint.tensors.items() if record.group == "optim")
    state = sorted({name.rpartition(".")[2] for name in names} - {AMAX_HISTORY})
    histories = {
        name: list(record.shape)
        for name, record in checkpoint.tensors.items()
        if name.endswith(f".{AMAX_HISTORY}")
    }
    continues = bool(state) or "trainer" in checkpoint.values()  # some update rules have no state
    run = checkpoint.values().get("run")
    product, rule = recorded_product(run), recorded_rule(run)
    return _CheckpointInfo(
        checkpoint.iteration,
        checkpoint.path,
        checkpoint.model,
        continues,
        state,
        product,
        rule,
        histories,
    )


def _refuse_other_rule(trainer: Trainer, found: _CheckpointInfo) -> None:
    """Refuses a checkpoint with the state of another update rule, or without main parameters."""
    if trainer.optimizer.main.saved and MAIN_SUFFIX not in found.optimizer_state:
        raise TrainError(
            f"{found.path} has no main weights, because it was saved with fp32 weights or with "
            "--main-params-dtype bf16; give the flags of precision that it was saved with, or "
            "--no-load-optim to begin with a new state"
        )
    current_names = {*trainer.optimizer.state_names}
    saved_names = {*found.optimizer_state} - {MAIN_SUFFIX, AVERAGE_SUFFIX}
    rule = trainer.optimizer.config.optimizer
    incomplete = current_names - saved_names and found.rule not in ("", rule)
    if saved_names - current_names or (current_names and not saved_names) or incomplete:
        saved, current = (
            ", ".join(sorted(names)) or "none" for names in (saved_names, current_names)
        )
        raise TrainError(
            f"{found.path} was saved with another update rule: it has the optimizer state {saved}, "
            f"and --optimizer {rule} has {current}; give the --optimizer that it was saved with, "
            "or --no-load-optim to begin with a new state"
        )


def _added_shapes(trainer: Trainer) -> dict[str, list[int]]:
    """Returns the global shapes of the parameters that products add on this rank, by name."""
    names, table = (
        chain(*map(added_parameter_names, trainer.task.stages)),
        trainer.engine.stages.table,
    )
    return {name: list(table[name].shape) for name in sorted({*names})}


def _weights_of(trainer: Trainer) -> dict[str, Any]:
    """Returns views of the model: parameters, and state that does not belong to one of them."""
    stages = trainer.engine.stages
    extra = {name for name, state in stages.states.items() if state.of_parameter}
    return {name: views for name, views in stages.views().items() if name not in extra}


def refuse_other_model(
    trainer: Trainer,
    run: RunRecord,
    model: ModelRecord | None,
    path: Path,
    ignored: Iterable[str] = (),
) -> None:
    """Refuses a ``model`` that differs from the trainer's, except in the fields ``ignored``.

    Raises:
        TrainError: The model differs or is not recorded; the message names the differing fields.
    """
    if model is None:
        raise TrainError(f"{path} has no record of its model; load another checkpoint")
    try:
        saved_config = dict(trainer.task.migrated_config(model))
    except ValueError as error:
        raise TrainError(f"{path} holds another model: {error}; load another checkpoint") from None
    current_config = dict(trainer.task.model_record.config)
    for name in ignored:
        saved_config.pop(name, None)
        current_config.pop(name, None)
    changed = describe_differences(saved_config, current_config)
    if changed:
        given = ""
        size = saved_config.get("vocab_size")
        differs = size != current_config.get("vocab_size")
        if size is not None and differs and uses_null_tokenizer(run):
            given = (
                f" (--vocab-size {size - 1}, since NullTokenizer adds the end-of-document token)"
            )
        raise TrainError(
            f"{path} holds another model: {changed}; give the values of the checkpoint{given}, or "
            "load another checkpoint"
        )
