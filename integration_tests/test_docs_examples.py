"""Every Python example of the documentation runs unchanged.

The ``python`` blocks of a page run in order, in one process and one namespace, in an empty folder.
A failure names the page and the line. `test_docs_commands.py` runs the command lines and the blocks
with a title, which are files.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import PAGES, ROOT, Block, blocks
from preloaded import Preloaded

TIMEOUT = 240

# The code runs as __main__, so that its classes can be pickled, with the page's line numbers.
RUNNER = """
import json as _json, sys as _sys
_page, _blocks = _json.loads(_sys.stdin.read())
for _line, _code in _blocks:
    exec(compile("\\n" * _line + _code, _page, "exec"), globals())
"""


def run_examples(page: Path, folder: Path, preloaded: Preloaded) -> str:
    """Returns the failure in the page's Python blocks, or an empty string."""
    found = [(block.line, block.text) for block in blocks(page.read_text()) if is_python(block)]
    try:
        done = preloaded.run(
            [sys.executable, "-c", RUNNER],
            input=json.dumps([str(page), found]),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        return f"{page}: its examples did not end within {TIMEOUT} s"
    return done.stderr[-4000:] if done.returncode else ""


def is_python(block: Block) -> bool:
    return block.language == "python" and not block.title


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


WITH_PYTHON = [page for page in PAGES if any(map(is_python, blocks(page.read_text())))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path, preloaded: Preloaded) -> None:
    wrong = run_examples(page, tmp_path, preloaded)
    assert not wrong, wrong


def test_a_failing_example_is_named_with_its_line(tmp_path: Path, preloaded: Preloaded) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Text\n\n```python\nx = 1\n```\n\n- item\n\n    ```python\n    x / 0\n    ```\n"
    )
    assert re.search(rf'File "{page}", line 10.*\n.*x / 0', run_examples(page, tmp_path, preloaded))
