"""Refuses every case of `refusals.cases` in a process that cannot import torch; prints JSON.

For each case: the error, the lines of source that raised it, and the error of the mended
configuration, if there is one.
"""

import json
import sys

sys.modules["torch"] = None  # type: ignore[assignment]  # every import of it fails

from megatron_models.errors import ConfigError  # noqa: E402
from megatron_models.kinds import find_kind  # noqa: E402
from megatron_models.parameters import parameter_shapes  # noqa: E402
from megatron_models.stages import plan_stage  # noqa: E402
from megatron_parallel import LayoutError, ParallelLayout  # noqa: E402

from refusals.cases import CASES  # noqa: E402
from refusals.cases.case import SMALL  # noqa: E402


def build(kind, fields, layout):
    """Plans a model and its layout, without memory for it."""
    given = {name: value for name, value in {**SMALL, **fields}.items() if value is not None}
    config = find_kind(kind).config(**given)
    parallel = ParallelLayout(**{"dp": 1, **layout})
    config.check_layout(parallel)
    if kind == "gpt":
        plan_stage(config, parallel, 0)
    parameter_shapes(config)


def raised(error):
    """Returns file and line of each frame of an error and of those that it replaced."""
    found = []
    while error is not None:
        frame = error.__traceback__
        while frame is not None:
            found.append([frame.tb_frame.f_code.co_filename, frame.tb_lineno])
            frame = frame.tb_next
        error = error.__context__
    return found


def outcome(kind, fields, layout):
    """Returns the error of a configuration and its lines; None and no lines if it is accepted."""
    try:
        build(kind, fields, layout)
    except (ConfigError, LayoutError) as error:
        return str(error), raised(error)
    return None, []


report = {}
for name, case in CASES.items():
    message, lines = outcome(case.kind, case.fields, case.layout)
    mended = None
    if case.fix is not None or case.fixed_layout is not None:
        layout = case.layout if case.fixed_layout is None else case.fixed_layout
        mended, _ = outcome(case.kind, {**case.fields, **(case.fix or {})}, layout)
    report[name] = {"message": message, "lines": lines, "mended": mended}
json.dump(report, sys.stdout)
