import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_data import HuggingFaceTokenizer, IndexedDatasetBuilder, train_bpe

WORDS = [
    *("the", "whale", "sea", "ship", "captain", "said", "and", "of", "a", "in", "to", "his"),
    *("upon", "white", "old", "man", "boat", "not", "with", "Nantucket", "voyage", "harpoon"),
    *("über", "naïve", "日本", "voilà"),
]


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Returns values computed by megatron-core."""
    content: dict[str, Any] = json.loads(Path(__file__).with_name("golden.json").read_text())
    return content


@pytest.fixture(scope="session")
def texts() -> list[str]:
    random = np.random.default_rng(0)
    return [" ".join(random.choice(WORDS, random.integers(3, 60))) + ".\n" for _ in range(300)]


@pytest.fixture(scope="session")
def tokenizer(texts: list[str]) -> HuggingFaceTokenizer:
    return train_bpe(texts, 340)


@pytest.fixture(scope="session")
def corpus(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    write_lines(path, texts)
    return path


def write_lines(path: Path, texts: Sequence[str], key: str = "text") -> None:
    path.write_text(
        "".join(json.dumps({key: text}, ensure_ascii=False) + "\n" for text in texts),
        encoding="utf-8",
    )


@pytest.fixture
def write_dataset(tmp_path: Path) -> Callable[..., str]:
    """Writes documents of one sequence each and returns the prefix."""

    def write(documents: Sequence[Sequence[int]], name: str = "d", dtype: str = "uint16") -> str:
        prefix = tmp_path / name
        with IndexedDatasetBuilder(prefix, dtype) as builder:
            for tokens in documents:
                builder.add_document(tokens, [len(tokens)])
            builder.finalize()
        return str(prefix)

    return write


@pytest.fixture
def check_resume_after_kills() -> Callable[[int, Sequence[str], Path, dict[str, bytes]], None]:
    """Returns a function that kills a program at random times and compares its final output.

    The program takes the number of workers as its last argument. It prints "ready" before the work
    and "done N" after it, where N is the number of chunks finished by earlier runs.
    """

    def check(seed: int, program: Sequence[str], out: Path, wanted: dict[str, bytes]) -> None:
        choose = random.Random(seed)

        def start() -> "subprocess.Popen[str]":
            process = subprocess.Popen(
                [sys.executable, *program, str(choose.choice((1, 2)))],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert process.stdout and process.stdout.readline() == "ready\n"
            return process

        for _ in range(1 if seed == 0 else 2):
            process = start()
            time.sleep(choose.uniform(0.1, 0.8))
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=60)
            for path in out.parent.glob(f"{out.name}_*"):
                assert path.read_bytes() == wanted[path.name], "incomplete output"
        kept = len(list(out.with_name(f".{out.name}.parts").glob("*.part")))
        process = start()
        shown, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        assert int(shown.split()[1]) == kept
        made = {path.name: path.read_bytes() for path in out.parent.iterdir()}
        assert made == wanted, "different bytes or leftover files"

    return check
