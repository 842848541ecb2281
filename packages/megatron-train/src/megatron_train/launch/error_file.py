"""The file in which a rank says to torchrun why it failed.

torchrun names a file to each rank by ``TORCHELASTIC_ERROR_FILE`` and quotes it in its summary,
which comes last. Its form is that of ``torch.distributed.elastic.multiprocessing.errors``
(``ErrorHandler`` writes it, ``ProcessFailure`` reads it): of ``message`` torchrun shows
``extraInfo.py_callstack``, or where there is none ``message``.
"""

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from megatron_train.launch.link import FailureReport

_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def write_error_file(report: FailureReport, environment: Mapping[str, str] = os.environ) -> None:
    """Writes ``report`` where torchrun looks for it; nothing happens outside of torchrun.

    An interrupt is no failure, and leaves no file.
    """
    path = environment.get(_VARIABLE)
    if not path or report.kind == "interrupted":
        return
    extra = {"timestamp": str(int(time.time()))}
    line = f"megatron-train: error: {report.message}"
    if report.traceback:
        extra["py_callstack"] = f"{line}\n{report.traceback}"
    content = json.dumps({"message": {"message": line, "extraInfo": extra}})
    with contextlib.suppress(OSError):  # the failure itself is reported in any case
        Path(path).write_text(content, encoding="utf-8")
