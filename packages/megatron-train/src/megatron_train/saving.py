"""Saves checkpoints of a run.

A checkpoint has everything that determines how the run continues: parameters, optimizer state,
position in the data and the state of callbacks. There is no random state, since initial weights and
the order of samples follow from the seed. A checkpoint also has the family and configuration of the
model and its tokenizer, so that the model can be built from the checkpoint alone.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ckpt import CheckpointStore, Retention, View
from megatron_data import Tokenizer

from megatron_train.config.from_checkpoint import TOKENIZER_FOLDER
from megatron_train.metrics.console import Console
from megatron_train.run_record import RunRecord
from megatron_train.saved_values import read_value
from megatron_train.step_report import StepReport
from megatron_train.trainer import Callback, Trainer


@dataclass(frozen=True)
class SavedCheckpoint:
    """The path of a checkpoint and the number of steps before it."""

    path: Path
    iteration: int


class Saver(Callback):
    """Saves a checkpoint every ``interval`` steps and when the run ends.

    Args:
        store: Store to save into.
        run: Record of the run, saved in each checkpoint.
        tokenizer: Tokenizer to save in each checkpoint, if any.
        interval: Steps between checkpoints. None saves only at the end.
        keep_last: Number of complete checkpoints to keep. None keeps all.
        console: Console that saves are printed to.
        origin: Checkpoint whose weights the run began with, recorded in each checkpoint. Empty if
            the weights were initialized from the seed.
    """

    name = "saver"

    def __init__(
        self,
        store: CheckpointStore,
        run: RunRecord,
        tokenizer: Tokenizer | None,
        interval: int | None,
        keep_last: int | None,
        console: Console,
        *,
        origin: str = "",
    ) -> None:
        self._origin = origin
        self._store = store
        self._run = dict(run)
        self._files = {} if tokenizer is None else tokenizer_files(tokenizer)
        self._every = interval
        self._retention = Retention(latest=keep_last)
        self._console = console
        self._saved = 0
        self.newest: SavedCheckpoint | None = None
        """The newest checkpoint that this process saved."""

    def on_start(self, trainer: Trainer) -> None:
        """Records the step that the run continues from, which is saved already."""
        self._saved = trainer.iteration

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """Saves at the end of each interval."""
        if self._every is not None and report.iteration % self._every == 0:
            self._save(trainer)

    def on_end(self, trainer: Trainer) -> None:
        """Saves at the end of the run."""
        self._save(trainer)

    def state(self) -> dict[str, Any]:
        """Returns the origin of the run's first weights."""
        return {"origin": self._origin}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the origin of the run's first weights."""
        self._origin = read_value(state, "origin", str)

    def _save(self, trainer: Trainer) -> None:
        if trainer.iteration == self._saved:
            return
        trainer.settle()  # all ranks fail together after a step that was not finite
        state: dict[str, Any] = dict(views_of(trainer))
        if trainer.engine.mesh.rank == 0:  # unsharded values are equal on all ranks
            state["trainer"] = trainer.state()
            state["optimizer"] = trainer.optimizer.scalars()
            state["run"] = self._run
        path = self._store.save(
            trainer.iteration,
            state,
            model=trainer.task.model_record,
            files=self._files,
            retention=self._retention,
            replace=True,
        )
        self._saved, self.newest = trainer.iteration, SavedCheckpoint(path, trainer.iteration)
        self._console.print_line(f"saved checkpoint {path}")


def views_of(trainer: Trainer) -> dict[str, list[View]]:
    """Returns views of all parameters, optimizer states and averages by global name."""
    averages = {} if trainer.averages is None else trainer.averages.views()
    stages: dict[str, Any] = dict(trainer.engine.stages.views())
    return {**stages, **trainer.optimizer.views(), **averages}


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Returns the contents of a tokenizer's files by their names in a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        return {
            f"{TOKENIZER_FOLDER}/{path.relative_to(folder).as_posix()}": path.read_bytes()
            for path in sorted(Path(folder).rglob("*"))
            if path.is_file()
        }
