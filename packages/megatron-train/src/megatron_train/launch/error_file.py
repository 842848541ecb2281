"""The file in which a rank reports its failure to torchrun.

torchrun passes each rank the path of a file in ``TORCHELASTIC_ERROR_FILE`` and quotes the file in
its final summary. The format is that of ``torch.distributed.elastic.multiprocessing.errors``
(``ErrorHandler`` writes it, ``ProcessFailure`` reads it). torchrun shows
``message.extraInfo.py_callstack``, or ``message.message`` if there is no call stack.
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
    """Writes ``report`` to the error file of torchrun.

    Does nothing outside of torchrun, and nothing after an interrupt, which is not a failure.
    """
    path = environment.get(_VARIABLE)
    if not path or report.kind == "interrupted":
        return
    extra = {"timestamp": str(int(time.time()))}
    line = f"megatron-train: error: {report.message}"
    if report.traceback:
        extra["py_callstack"] = f"{line}\n{report.traceback}"
    content = json.dumps({"message": {"message": line, "extraInfo": extra}})
    with contextlib.suppress(OSError):  # the rank prints the failure as well
        Path(path).write_text(content, encoding="utf-8")
