"""Annotations are checked independent of what earlier processes checked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHAPES = """
import numpy
from jaxtyping import Float


def first(x: Float[numpy.ndarray, "n"]) -> float:
    return float(x.ravel()[0])
"""
CALL = """
import sys

import numpy
from checked_shapes import check_shapes

check_shapes(sys.argv[1].split(","))
import outer

outer.inner.first(numpy.zeros((2, 2)))
"""


@pytest.mark.parametrize(
    ("before", "now", "checked"),
    [("outer", "outer,inner", True), ("outer,inner", "outer", False)],
)
def test_bytecode_of_earlier_processes_changes_nothing(
    tmp_path: Path, before: str, now: str, checked: bool
) -> None:
    (tmp_path / "outer.py").write_text("import inner\n")
    (tmp_path / "inner.py").write_text(SHAPES)
    (tmp_path / "call.py").write_text(CALL)
    tooling = str(Path(__file__).parents[1])
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": tooling}
    ran = [
        subprocess.run([sys.executable, "call.py", modules], cwd=tmp_path, env=env, check=False)
        for modules in (before, now)
    ]
    assert (ran[1].returncode != 0) == checked
    assert list(tmp_path.glob("__pycache__/inner*jaxtyping*"))
