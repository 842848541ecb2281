"""Putting a run together: from its configuration to a trainer with everything around it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from megatron_ckpt import CheckpointStore
from megatron_data import Tokenizer, load_tokenizer
from megatron_models import GPT, ConfigError, GPTConfig, parameter_count
from megatron_optim import Optimizer
from megatron_parallel import Mesh, collect_shardings

from megatron_train.batches import GPTBatches
from megatron_train.callbacks.callback import Callback
from megatron_train.callbacks.evaluation import Evaluation, Listener
from megatron_train.callbacks.log_line import LogLine
from megatron_train.callbacks.recording import Progress, Recorder, TensorBoard
from megatron_train.callbacks.stopping import StopAt, StopOnSignal
from megatron_train.checkpointing import Saver, restore
from megatron_train.config.files import to_yaml
from megatron_train.config.options import options_of
from megatron_train.config.run import SECTIONS, RunConfig, run_options
from megatron_train.config.values import Values
from megatron_train.errors import TrainError
from megatron_train.metrics.console import Console
from megatron_train.metrics.environment import environment
from megatron_train.metrics.peak import device_peak
from megatron_train.tasks.gpt import GPTTask
from megatron_train.trainer import Trainer

CONFIG_FILE = "config.yaml"


def pretrain_gpt(config: RunConfig, values: Values | None = None) -> int:
    """Train a GPT model as ``config`` says, and print as it goes.

    Args:
        config: the whole run.
        values: where its values came from, to be printed.

    Returns:
        0, or 128 plus the number of the signal that ended the run early.

    Raises:
        TrainError: a run that cannot be made or continued; the packages' own exceptions for what
            each of them refuses.
    """
    console = Console()
    device, dtype = choose_device(config.training.device), choose_dtype(config)
    _refuse_foreign_folder(config)
    with console.warnings_of("megatron_ckpt"), _deterministic(config.training.deterministic_mode):
        mesh = Mesh.single(device)
        facts = environment(device)
        _describe(console, config, values, facts, dtype)
        tokenizer = load_run_tokenizer(config)
        batches = GPTBatches(config, tokenizer)
        trainer = build_gpt_trainer(config, batches, mesh, dtype)
        order = data_order(config)
        trainer.callbacks = _callbacks(config, console, mesh, dtype, batches, tokenizer, facts)
        if config.checkpoint.load is not None:
            _continue(config, trainer, mesh, order, console)
        try:
            with StopOnSignal(trainer):
                stop = trainer.run()
        finally:
            console.stop_bar()
    if stop is None:
        return 0
    console.line(f"stopped after step {trainer.iteration} of {trainer.train_iters}: {stop.reason}")
    return stop.status


def build_gpt_trainer(
    config: RunConfig, batches: GPTBatches, mesh: Mesh, dtype: torch.dtype
) -> Trainer:
    """Build model, optimizer and trainer, without any callback."""
    model = GPT(config.model, mesh, dtype=dtype, device=mesh.device, seed=config.training.seed)
    optimizer = Optimizer(
        dict(model.named_parameters()), collect_shardings(model), mesh, config.optimizer
    )
    task = GPTTask(
        model,
        family_of(config.model),
        reset_position_ids=config.data.reset_position_ids,
        reset_attention_mask=config.data.reset_attention_mask,
    )
    return Trainer(
        task=task,
        optimizer=optimizer,
        learning_rate=config.learning_rate_schedule(),
        weight_decay=config.weight_decay_schedule(),
        steps=batches.training,
        train_iters=config.training.train_iters,
        device=mesh.device,
        compile=config.training.compile,
    )


def choose_device(name: str) -> torch.device:
    """Return the device called ``name``; ``auto`` is a GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise TrainError("--device cuda: torch sees no GPU here; use --device cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_dtype(config: RunConfig) -> torch.dtype:
    """Return the dtype of weights and arithmetic."""
    if config.training.float64:
        return torch.float64
    return torch.bfloat16 if config.training.bf16 else torch.float32


def load_run_tokenizer(config: RunConfig) -> Tokenizer | None:
    """Return the run's tokenizer, or None where it has none.

    Raises:
        TrainError: it has more tokens than the model.
    """
    if config.data.tokenizer_model is None:
        return None
    tokenizer = load_tokenizer(Path(config.data.tokenizer_model))
    if tokenizer.vocab_size > config.model.vocab_size:
        raise TrainError(
            f"--vocab-size {config.model.vocab_size} is smaller than the {tokenizer.vocab_size} "
            f"tokens of {config.data.tokenizer_model}; leave it out to take the tokenizer's"
        )
    return tokenizer


def family_of(config: GPTConfig) -> str | None:
    """Return the name of the first family of published models that can express ``config``."""
    for entry in sorted(entry_points(group="megatron.families"), key=lambda entry: entry.name):
        try:
            entry.load().config_to_hf(config)
        except ConfigError:
            continue
        return entry.name
    return None


def data_order(config: RunConfig) -> dict[str, Any]:
    """Return everything that the order of training samples follows from."""
    data = config.data
    return {
        "data": list(data.data_path or data.train_data_path or ()),
        "split": data.split if data.data_path else None,
        "seq_length": data.seq_length,
        "seed": config.training.seed,
        "samples": config.training.train_iters * config.global_batch_size,
    }


def _callbacks(
    config: RunConfig,
    console: Console,
    mesh: Mesh,
    dtype: torch.dtype,
    batches: GPTBatches,
    tokenizer: Tokenizer | None,
    facts: dict[str, str],
) -> list[Callback]:
    """Return the callbacks of a run; those that save come last."""
    logging, callbacks = config.logging, list[Callback]()
    listeners: list[Listener] = []
    if logging.progress:
        tokens = config.global_batch_size * config.data.seq_length
        callbacks.append(Progress(console, tokens))
    peak = device_peak(mesh.device, dtype)
    if peak is not None:
        console.line(f"MFU is measured against {peak.flops_per_second:.4g} FLOP/s: {peak.source}")
    callbacks.append(
        LogLine(console, logging.log_interval, peak=peak, throughput=logging.log_throughput)
    )
    if config.checkpoint.save is not None:
        recorder = Recorder(Path(config.checkpoint.save), facts)
        callbacks.append(recorder)
        listeners.append(recorder.evaluated)
    if logging.tensorboard_dir is not None:
        board = TensorBoard(Path(logging.tensorboard_dir), logging.log_interval)
        callbacks.append(board)
        listeners.append(board.evaluated)
    if config.evaluation.eval_iters:
        interval = config.evaluation.eval_interval
        callbacks.append(Evaluation(console, batches.validation, interval, listeners))
    training = config.training
    callbacks.append(StopAt(training.exit_interval, training.exit_duration_in_mins))
    if config.checkpoint.save is not None:
        callbacks.append(
            Saver(
                CheckpointStore(config.checkpoint.save),
                mesh,
                data_order(config),
                tokenizer,
                config.checkpoint.save_interval,
                config.checkpoint.keep_last,
                console,
            )
        )
    return callbacks


def _refuse_foreign_folder(config: RunConfig) -> None:
    """Refuse to mix this run's checkpoints with those of another."""
    save, load = config.checkpoint.save, config.checkpoint.load
    if save is None or (load is not None and Path(load).resolve() == Path(save).resolve()):
        return
    found, _ = CheckpointStore(save).survey()
    if found is not None:
        raise TrainError(
            f"--save {save} already holds a run, at step {found.iteration}; add --load {save} to "
            "continue it, or give another folder"
        )


def _continue(
    config: RunConfig, trainer: Trainer, mesh: Mesh, order: dict[str, Any], console: Console
) -> None:
    """Restore from the folder of --load, or start fresh where it has no checkpoint."""
    load = str(config.checkpoint.load)
    if restore(trainer, Path(load), mesh, order, console):
        console.line(f"continuing from {load} after step {trainer.iteration}")
        if trainer.iteration >= trainer.train_iters:
            console.line(f"nothing left to do: --train-iters is {trainer.train_iters}")
    elif config.checkpoint.exit_on_missing_checkpoint:
        raise TrainError(f"--load {load} has no complete checkpoint; give a folder that has one")
    else:
        console.line(f"no complete checkpoint in {load}: starting fresh")


def _describe(
    console: Console,
    config: RunConfig,
    values: Values | None,
    facts: dict[str, str],
    dtype: torch.dtype,
) -> None:
    """Print environment, configuration and model size; keep the configuration with the run."""
    console.line("environment: " + ", ".join(f"{name} {value}" for name, value in facts.items()))
    if values is not None:
        console.line("configuration (what is not listed is the default):")
        for key in (option.key for option in run_options() if option.key in values.given):
            given = values.given[key]
            value = " ".join(given.value) if isinstance(given.value, tuple) else given.value
            console.line(f"  {key}: {value}  [{given.origin}]")
    count = parameter_count(config.model)
    precision = str(dtype).removeprefix("torch.")
    console.line(
        f"model: {count:,} parameters in {precision}; {config.global_batch_size} samples a step "
        f"in {config.accumulation} micro-batches of {config.training.micro_batch_size}"
    )
    if config.checkpoint.save is not None:
        write_config(config, Path(config.checkpoint.save) / CONFIG_FILE)


def write_config(config: RunConfig, path: Path) -> None:
    """Write every setting of a run to a YAML file that ``--config`` accepts."""
    sections: dict[str, dict[str, Any]] = {}
    for section, (_, cls) in SECTIONS.items():
        holder = getattr(config, section)
        values = {option.name: getattr(holder, option.name) for option in options_of(cls, section)}
        sections[section] = {name: value for name, value in values.items() if value is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(to_yaml(sections), encoding="utf-8")
    temporary.replace(path)


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Allow deterministic algorithms only, where wanted, and put the settings back afterwards."""
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
