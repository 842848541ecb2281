"""Putting a run together: from its configuration to a trainer with everything around it."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import cast

import torch
from megatron_ckpt import CheckpointStore, exchange
from megatron_data import Tokenizer
from megatron_models import CausalModel, Placement, find_kind, parameter_count
from megatron_optim import Optimizer, needs_matrices
from megatron_parallel import Mesh

from megatron_train.callbacks.evaluation import Evaluation, Test
from megatron_train.callbacks.listener import Listener
from megatron_train.callbacks.log_line import LogLine
from megatron_train.callbacks.recording import Progress, Recorder, TensorBoard
from megatron_train.callbacks.stopping import StopAt, StopOnSignal
from megatron_train.checkpointing import Saver, coordinator_of
from megatron_train.config.run import RunConfig
from megatron_train.config.run_sections import run_options
from megatron_train.config.shown import write_config
from megatron_train.config.values import Values
from megatron_train.engine import StepEngine
from megatron_train.errors import TrainError
from megatron_train.memory_check import refuse_what_cannot_fit
from megatron_train.metrics.console import Console
from megatron_train.metrics.environment import environment
from megatron_train.metrics.peak import Peak, cpu_rate, device_peak
from megatron_train.run_record import RunRecord, run_record
from megatron_train.shared_batches import Batches, open_batches
from megatron_train.starting import (
    Start,
    held_for_this_run,
    refuse_files_for_folders,
    what_is_kept,
)
from megatron_train.step_time import check_step_time
from megatron_train.tasks.gpt import GPTTask
from megatron_train.tokenizer import open_tokenizer
from megatron_train.trainer import Callback, Stop, Trainer

CONFIG_FILE = "config.yaml"


def pretrain_gpt(
    config: RunConfig, values: Values | None = None, *, command: str | None = None
) -> int:
    """Train a model as ``config`` says, and print as it goes.

    While it runs, no other run can save into the folder of --save.

    Args:
        config: the whole run.
        values: where its values came from, to be printed.
        command: what other runs are shown that find the folder in use. Defaults to the command line
            of this process.

    Returns:
        0, or 128 plus the number of the signal that ended the run early.

    Raises:
        TrainError: a run that cannot be made or continued, or whose folder another run holds; the
            packages' own exceptions for what each of them refuses.
    """
    refuse_files_for_folders(config)
    device, dtype = choose_device(config.training.device), choose_dtype(config)
    mesh = join(config, device)
    console = Console(silent=mesh.rank != 0)
    coordinator = coordinator_of(mesh)
    with (
        held_for_this_run(config.checkpoint, coordinator, command or shlex.join(sys.argv)),
        console.warnings_of("megatron_ckpt"),
        console.warnings_of("megatron_data"),
        _deterministic(config.training.deterministic_mode),
    ):
        start = Start.find(config.checkpoint, coordinator)
        family = start.family_of(config)
        refuse_what_cannot_fit(config, mesh.device)
        peak = device_peak(mesh.device, dtype) if mesh.rank == 0 else None
        rate = cpu_rate(dtype) if mesh.device.type == "cpu" else peak
        # One rank decides: each may measure another peak.
        if long := exchange(coordinator, lambda: None, lambda _: check_step_time(config, rate)):
            console.warn(long)
        facts = environment(mesh.device)
        # Printed with the first line there is: what is refused before needs no environment.
        console.preface = partial(_description, config, values, facts, dtype)
        tokenizer = load_run_tokenizer(config)
        batches = open_batches(config, tokenizer, mesh, console.line)
        # One rank looks at the corpora, since others need not have them (--broadcast-batches).
        record = exchange(coordinator, lambda: None, lambda _: run_record(config, tokenizer))
        trainer = build_gpt_trainer(config, batches, mesh, dtype, family)
        run = _Run(config, console, mesh, peak, batches, tokenizer, facts, start, record)
        trainer.callbacks = run.callbacks()
        continued = start.take(trainer, config, record, console)
        console.line(str(trainer.engine.fusion))
        if batches.untested:
            console.line(f"no test after the last step: {batches.untested}")
        if config.checkpoint.save is not None:
            path = Path(config.checkpoint.save) / CONFIG_FILE
            exchange(coordinator, lambda: None, lambda _: write_config(config, path))
        kept = partial(what_is_kept, trainer, config.checkpoint, start, continued)
        stop = _train(trainer, console, kept)
    mesh.close()  # only here: after an error, ranks that still wait would be waited for
    return 0 if stop is None else stop.status


def _train(trainer: Trainer, console: Console, kept: Callable[[], str]) -> Stop | None:
    """Train, and say what is ``kept`` where that ends early; return why it did."""
    try:
        with StopOnSignal(trainer):
            stop = trainer.run()
    except KeyboardInterrupt:
        console.line(
            f"interrupted after step {trainer.iteration} of {trainer.train_iters}; {kept()}"
        )
        raise
    finally:
        console.stop_bar()
    if stop is not None:
        console.line(
            f"stopped after step {trainer.iteration} of {trainer.train_iters}: {stop.reason}; "
            f"{kept()}"
        )
    return stop


def join(config: RunConfig, device: torch.device) -> Mesh:
    """Take this rank's place in the layout of the run, or be its only rank.

    Raises:
        LayoutError: ranks that do not arrive, or were started with another configuration.
    """
    settings = (
        (option, getattr(getattr(config, option.section), option.name)) for option in run_options()
    )
    return Mesh.bind(
        config.layout,
        device=device,
        timeout=timedelta(minutes=config.training.distributed_timeout_minutes),
        configuration={option.flag: str(value) for option, value in settings},
    )


def build_gpt_trainer(
    config: RunConfig,
    batches: Batches,
    mesh: Mesh,
    dtype: torch.dtype,
    family: str | None = None,
) -> Trainer:
    """Build this rank's stages of the model, optimizer and trainer, without any callback.

    ``family`` is kept in checkpoints.
    """
    training = config.training
    stages = find_kind(config.model.kind).build(
        config.model,
        Placement(
            mesh,
            sequence_parallel=training.sequence_parallel,
            tp_comm_overlap=training.tp_comm_overlap,
            recompute=config.recompute,
            dispatcher=training.moe_token_dispatcher_type,
            dtype=dtype,
            device=mesh.device,
            cp_comm_type=training.cp_comm_type,
        ),
        split=config.split,
        seed=training.seed,
    )
    task = GPTTask(
        cast(list[CausalModel], stages),
        family,
        seed=training.seed,
        hidden_dropout=training.hidden_dropout,
        attention_dropout=training.attention_dropout,
        reset_position_ids=config.data.reset_position_ids,
        reset_attention_mask=config.data.reset_attention_mask,
        cut_per_document=training.context_parallel_split == "per_document",
        sequence_length=config.data.seq_length,
    )
    engine = StepEngine(
        task,
        mesh,
        replace(config.data_parallel, whole_matrices=needs_matrices(config.optimizer)),
        compile=training.compile,
        schedule=config.pipeline.schedule_of(mesh.layout),
        group_size=config.pipeline.group_size,
        per_token=training.calculate_per_token_loss,
    )
    optimizer = Optimizer(
        engine.parameters,
        engine.table,
        mesh,
        config.optimizer,
        gradients=engine.gradients,
        shards=engine.shards,
    )
    return Trainer(
        engine=engine,
        optimizer=optimizer,
        learning_rate=config.learning_rate_schedule(),
        decoupled_learning_rate=config.learning_rate_schedule(decoupled=True),
        weight_decay=config.weight_decay_schedule(),
        steps=batches.training,
        train_iters=config.train_iters,
        check_for_nan=config.data_parallel.check_for_nan_in_loss_and_grad,
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
    data = config.data
    tokenizer = open_tokenizer(data, config.model.vocab_size)
    if tokenizer is not None and tokenizer.vocab_size > config.model.vocab_size:
        name = data.tokenizer_model or data.vocab_file or data.tokenizer_type
        raise TrainError(
            f"--vocab-size {config.model.vocab_size} is smaller than the {tokenizer.vocab_size} "
            f"tokens of {name}; leave it out to take the tokenizer's"
        )
    return tokenizer


@dataclass(frozen=True)
class _Run:
    """What the parts of a run share."""

    config: RunConfig
    console: Console
    mesh: Mesh
    peak: Peak | None
    batches: Batches
    tokenizer: Tokenizer | None
    facts: dict[str, str]
    start: Start
    record: RunRecord

    def callbacks(self) -> list[Callback]:
        """Return the callbacks of this rank; those that save come last.

        Only rank 0 tells and records; what all ranks do together is on all of them.
        """
        config, tells = self.config, self.mesh.rank == 0
        telling, listeners, testers = self._telling() if tells else ([], [], [])
        callbacks = list(telling)
        if config.evaluation.eval_iters:
            interval = config.evaluation.eval_interval
            source = self.batches.validation
            callbacks.append(Evaluation(self.console, source, interval, listeners))
        if self.batches.tests:
            callbacks.append(Test(self.console, self.batches.testing, testers))
        training = config.training
        callbacks.append(StopAt(training.exit_interval, training.exit_duration_in_mins))
        if config.checkpoint.save is not None:
            callbacks.append(
                Saver(
                    CheckpointStore(config.checkpoint.save, coordinator_of(self.mesh)),
                    self.record,
                    self.tokenizer,
                    config.checkpoint.save_interval,
                    config.checkpoint.keep_last,
                    self.console,
                    origin=self.start.origin,
                )
            )
        return callbacks

    def _telling(self) -> tuple[list[Callback], list[Listener], list[Listener]]:
        """Return what shows and records, and who is told of evaluations and of the test."""
        config, logging = self.config, self.config.logging
        callbacks: list[Callback] = []
        listeners: list[Listener] = []
        testers: list[Listener] = []
        if logging.progress:
            samples, length = config.consumed_samples, config.data.seq_length
            callbacks.append(Progress(self.console, samples, length))
        recorder = None
        if config.checkpoint.save is not None:
            facts = {**self.facts, "layout": layout_in_words(config)}
            recorder = Recorder(Path(config.checkpoint.save), facts, self.console)
        callbacks.append(
            LogLine(
                self.console,
                logging.log_interval,
                peak=self.peak,
                throughput=logging.log_throughput,
                listeners=() if recorder is None else (recorder.logged,),
            )
        )
        if recorder is not None:
            callbacks.append(recorder)
            listeners.append(recorder.evaluated)
            testers.append(recorder.tested)
        if logging.tensorboard_dir is not None:
            board = TensorBoard(Path(logging.tensorboard_dir), logging.log_interval)
            callbacks.append(board)
            listeners.append(board.evaluated)
        return callbacks, listeners, testers


def _description(
    config: RunConfig,
    values: Values | None,
    facts: dict[str, str],
    dtype: torch.dtype,
) -> Iterator[str]:
    """Yield lines on environment, configuration and model size."""
    yield "environment: " + ", ".join(f"{name} {value}" for name, value in facts.items())
    if values is not None:
        yield "configuration (what is not listed is the default):"
        for key in (option.key for option in run_options() if option.key in values.given):
            given = values.given[key]
            value = (
                " ".join(map(str, given.value)) if isinstance(given.value, tuple) else given.value
            )
            yield f"  {key}: {value}  [{given.origin}]"
    count = parameter_count(config.model)
    precision = str(dtype).removeprefix("torch.")
    layout = config.layout
    if layout.world_size > 1:
        yield f"layout: {layout_in_words(config)}"
    yield (
        f"model: {count:,} parameters (without padding of the vocabulary) in {precision}; "
        f"{_span(config.batch_sizes.sizes)} samples a step in {_micro_batches(config)}"
    )


def _micro_batches(config: RunConfig) -> str:
    """Return what a step is computed in, on each rank."""
    layout, training = config.layout, config.training
    if layout.hybrid_cp:
        room = training.max_seqlen_per_dp_cp_rank
        return f"rows of at most {room} tokens a rank, in a pool of {layout.pool}"
    counts = [size // config.samples_at_once for size in config.batch_sizes.sizes]
    batches = "micro-batch" if max(counts) == 1 else "micro-batches"
    share = "" if layout.dp == 1 else f" on each of {layout.dp} data parallel ranks"
    return f"{_span(counts)} {batches} of {training.micro_batch_size}{share}"


def _span(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least} to {most}"


def layout_in_words(config: RunConfig) -> str:
    """Return how many ranks a run has, and what each axis cuts where there are several."""
    layout = config.layout
    if layout.world_size == 1:
        return "1 rank"
    cut = ", sequence parallel" if config.training.sequence_parallel else ""
    return f"{layout.world_size} ranks, {layout}{cut}"


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
