"""Assembles and executes a run: from its configuration to a trainer with its callbacks."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path

import torch
from megatron_ckpt import CheckpointStore, map_reduce
from megatron_data import Tokenizer
from megatron_parallel import Mesh

from megatron_train.assembly import (
    build_trainer,
    choose_device,
    choose_dtype,
    load_run_tokenizer,
)
from megatron_train.broadcast_batches import Batches, open_batches
from megatron_train.callbacks.evaluation import Evaluation, TestSetEvaluation
from megatron_train.callbacks.listener import Listener
from megatron_train.callbacks.log_line import LogLine
from megatron_train.callbacks.recording import ProgressBar, Recorder, TensorBoard
from megatron_train.callbacks.stopping import StopAt, StopOnSignal
from megatron_train.config.dump import write_config
from megatron_train.config.run import RunConfig
from megatron_train.config.run_sections import run_options
from megatron_train.config.values import Values
from megatron_train.group_table import group_table
from megatron_train.kernels import describe_products, explain_run_backends
from megatron_train.memory_check import check_memory
from megatron_train.mesh_coordinator import coordinator_of
from megatron_train.metrics.console import Console
from megatron_train.metrics.environment import environment
from megatron_train.metrics.peak import Peak, assumed_cpu_peak, device_peak
from megatron_train.products import trains_adapters_only
from megatron_train.run_description import describe_layout, describe_run
from megatron_train.run_record import RunRecord, run_record
from megatron_train.saving import Saver
from megatron_train.starting_point import (
    StartingPoint,
    check_output_folders,
    describe_saved_progress,
    lock_save_folder,
)
from megatron_train.step_time import check_step_time
from megatron_train.tasks.kinds import find_task_kind
from megatron_train.tokenizer import TokenizerCache
from megatron_train.trainer import Callback, Stop, Trainer

CONFIG_FILE = "config.yaml"


def train(
    config: RunConfig,
    values: Values | None = None,
    *,
    command: str | None = None,
    tokenizers: TokenizerCache | None = None,
) -> int:
    """Trains a model and prints progress.

    Meanwhile no other run can save into the folder of --save.

    Args:
        config: The run.
        values: The given values and their origins, to print.
        command: Command that errors of other runs show for the folder in use. Defaults to the
            command line of this process.
        tokenizers: Tokenizers that are open already.

    Returns:
        0, or 128 plus the number of the signal that ended the run early.

    Raises:
        TrainError: The run cannot be built or continued, or another run uses its folder. The other
            packages raise their own exceptions.
    """
    check_output_folders(config)
    device, dtype = choose_device(config.training.device), choose_dtype(config)
    mesh = build_mesh(config, device)
    console = Console(silent=mesh.rank != 0)
    coordinator = coordinator_of(mesh)
    with (
        lock_save_folder(config.checkpoint, coordinator, command or shlex.join(sys.argv)),
        console.forward_warnings("megatron_ckpt"),
        console.forward_warnings("megatron_data"),
        _deterministic(config.training.deterministic_mode),
    ):
        start = StartingPoint.find(config.checkpoint, coordinator)
        family = start.resolve_family(config)
        check_memory(config, mesh.device)
        peak = device_peak(mesh.device, dtype) if mesh.rank == 0 else None
        rate = assumed_cpu_peak(dtype) if mesh.device.type == "cpu" else peak
        # Rank 0 decides for all, since ranks may measure different peaks.
        if long := map_reduce(coordinator, lambda: None, lambda _: check_step_time(config, rate)):
            console.warn(long)
        kernels = explain_run_backends(config, mesh.device, dtype)
        facts = environment(mesh.device)
        # Printed before the first line of output, so that an early error prints no description.
        console.header = partial(describe_run, config, values, facts, dtype, kernels)
        tokenizer = load_run_tokenizer(config, tokenizers)
        task = find_task_kind(config.task)
        data = cache(partial(task.open_data, config, tokenizer))
        batches = open_batches(config, data, mesh, console.print_line)
        # Only rank 0 reads the corpora: with --broadcast-batches other ranks may not have them.
        record = map_reduce(
            coordinator,
            lambda: None,
            lambda _: run_record(config, tokenizer, data().identity()),
        )
        trainer = build_trainer(config, task, batches, mesh, dtype, family)
        run = _Run(config, console, mesh, peak, batches, tokenizer, facts, start, record)
        trainer.callbacks = run.callbacks()
        continued = start.load(trainer, config, record, console)
        if continued is None and not start.weights_only and trains_adapters_only(config):
            console.warn(
                f"--linear-product {config.product} freezes weights that are initialized from "
                "--seed; begin with those of a checkpoint, with finetune or with --finetune --load"
            )
        for line in group_table(trainer.optimizer, trainer.engine.stages.table, coordinator):
            console.print_line(line)
        console.print_line(str(trainer.engine.fusion))
        if config.low_precision.enabled:
            console.print_line(describe_products(config, mesh.device, dtype))
        if batches.no_test_reason:
            console.print_line(f"no test after the last step: {batches.no_test_reason}")
        if config.checkpoint.save is not None:
            path = Path(config.checkpoint.save) / CONFIG_FILE
            map_reduce(coordinator, lambda: None, lambda _: write_config(config, path))
        kept = partial(describe_saved_progress, trainer, config.checkpoint, start, continued)
        stop = _train(trainer, console, kept)
    mesh.close()  # not after an error, when closing would wait for ranks that are blocked
    return 0 if stop is None else stop.status


def _train(trainer: Trainer, console: Console, kept: Callable[[], str]) -> Stop | None:
    """Trains; returns why the run ended early. Prints the text of ``kept`` in that case."""
    try:
        with StopOnSignal(trainer):
            stop = trainer.run()
    except KeyboardInterrupt:
        console.print_line(
            f"interrupted after step {trainer.iteration} of {trainer.train_iters}; {kept()}"
        )
        raise
    finally:
        console.stop_bar()
    if stop is not None:
        console.print_line(
            f"stopped after step {trainer.iteration} of {trainer.train_iters}: {stop.reason}; "
            f"{kept()}"
        )
    return stop


def build_mesh(config: RunConfig, device: torch.device) -> Mesh:
    """Returns the mesh of the run, after all ranks have joined it.

    Raises:
        LayoutError: A rank does not join in time, or was started with another configuration.
    """
    settings = (
        (option, getattr(config.section_by_name(option.section), option.name))
        for option in run_options(config.model.kind, config.selected_extensions)
    )
    return Mesh.bind(
        config.layout,
        device=device,
        timeout=timedelta(minutes=config.training.distributed_timeout_minutes),
        configuration={option.flag: str(value) for option, value in settings},
    )


@dataclass(frozen=True)
class _Run:
    """The parts of a run that its callbacks are built from."""

    config: RunConfig
    console: Console
    mesh: Mesh
    peak: Peak | None
    batches: Batches
    tokenizer: Tokenizer | None
    facts: dict[str, str]
    start: StartingPoint
    record: RunRecord

    def callbacks(self) -> list[Callback]:
        """Returns the callbacks of this rank. Those that save come last.

        Callbacks that print and record are on rank 0 only; collective ones are on all ranks.
        """
        config = self.config
        is_first = self.mesh.rank == 0
        output, listeners, testers = self._output_callbacks() if is_first else ([], [], [])
        callbacks = list(output)
        if config.evaluation.eval_iters:
            interval = config.evaluation.eval_interval
            source = self.batches.validation
            callbacks.append(Evaluation(self.console, source, interval, listeners))
        if self.batches.has_test:
            callbacks.append(TestSetEvaluation(self.console, self.batches.testing, testers))
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

    def _output_callbacks(self) -> tuple[list[Callback], list[Listener], list[Listener]]:
        """Returns callbacks that print and record, and listeners of evaluations and of the test."""
        config, logging = self.config, self.config.logging
        callbacks: list[Callback] = []
        listeners: list[Listener] = []
        testers: list[Listener] = []
        if logging.progress:
            samples, length = config.consumed_samples, config.data.seq_length
            callbacks.append(ProgressBar(self.console, samples, length))
        recorder = None
        if config.checkpoint.save is not None:
            facts = {**self.facts, "layout": describe_layout(config)}
            recorder = Recorder(Path(config.checkpoint.save), facts, self.console)
        callbacks.append(
            LogLine(
                self.console,
                logging.log_interval,
                peak=self.peak,
                throughput=logging.log_throughput,
                listeners=() if recorder is None else (recorder.record_log_line,),
            )
        )
        if recorder is not None:
            callbacks.append(recorder)
            listeners.append(recorder.record_validation)
            testers.append(recorder.record_test)
        if logging.tensorboard_dir is not None:
            board = TensorBoard(Path(logging.tensorboard_dir), logging.log_interval)
            callbacks.append(board)
            listeners.append(board.write_validation)
        return callbacks, listeners, testers


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Allows only deterministic algorithms in the `with` block, if ``wanted``."""
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
