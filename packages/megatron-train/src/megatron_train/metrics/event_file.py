"""Writes scalars to an event file of TensorBoard.

`torch.utils.tensorboard` writes from a separate thread. If the disk is full, that thread ends with
a traceback, and the error that the run gets later does not name the file. Here every scalar is in
the file when `EventFile.add_scalar` returns.
"""

import os
import socket
import time
from pathlib import Path
from typing import Any

from megatron_train.metrics.append_only_file import AppendOnlyFile


class EventFile:
    """Writes a new event file in a folder.

    Args:
        folder: Folder of the run. Other event files in it are not changed.
        purge_step: TensorBoard drops values of this step and later ones in earlier event files.

    Raises:
        OSError: The file cannot be created or written; the message names it.
    """

    def __init__(self, folder: Path, purge_step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2  # slow to import: one second
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        now = time.time_ns()
        name = f"{now // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.{now % 10**9:09d}"
        self._file = AppendOnlyFile(folder / f"events.out.tfevents.{name}")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(step=purge_step, session_log=start)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Writes the value of a scalar at a step.

        Raises:
            OSError: The value cannot be written, for example because the disk is full. The message
                names the file.
        """
        scalar = self._summaries.Summary.Value(tag=name, simple_value=value)
        self._write(step=step, summary=self._summaries.Summary(value=[scalar]))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, **content: Any) -> None:
        event = self._events.Event(wall_time=time.time(), **content)
        self._records.write(event.SerializeToString())
