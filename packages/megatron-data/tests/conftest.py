import json
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
    """Numbers that megatron-core computed."""
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
