"""BERT, T5 and ICT samples of datasets at URLs, or without a memory map, equal those of a map."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_data import (
    BertDatasetConfig,
    Datasets,
    ICTDatasetConfig,
    IndexedDatasetBuilder,
    T5DatasetConfig,
    build_bert_datasets,
    build_ict_datasets,
    build_t5_datasets,
)
from megatron_data.datasets import MaskingConfig, WordPieces
from megatron_data.indexed.reader import IndexedDataset
from megatron_data.sources import StorageCache

fsspec = pytest.importorskip("fsspec", reason="URLs are an extra of this package")

PIECES = WordPieces(
    np.arange(100) % 4 == 3, 0, 1, 2, bos_id=4, eos_id=5, sentinel_ids=(6, 8, 9, 10)
)


@pytest.fixture
def prefixes(tmp_path: Path) -> Iterator[list[str]]:
    """Yields prefixes of two datasets of sentences with titles, also stored in fsspec's memory."""
    random = np.random.default_rng(0)
    memory = fsspec.filesystem("memory")
    for name in ("a", "b"):
        with (
            IndexedDatasetBuilder(tmp_path / name, "uint16") as text,
            IndexedDatasetBuilder(tmp_path / f"{name}_title", "uint16") as title,
        ):
            for _ in range(30):
                for _ in range(random.integers(2, 9)):
                    text.add_item(random.integers(12, 100, random.integers(1, 12)))
                text.end_document()
                title.add_document(random.integers(12, 100, 3), [3])
            text.finalize()
            title.finalize()
        for file in (f"{name}.bin", f"{name}.idx", f"{name}_title.bin", f"{name}_title.idx"):
            memory.pipe_file(f"/bucket/{file}", (tmp_path / file).read_bytes())
    yield [str(tmp_path / name) for name in ("a", "b")]
    memory.store.clear()


def bert(prefixes: list[str], **options: Any) -> Datasets:
    config = BertDatasetConfig(32)
    return build_bert_datasets(
        ["0.3", prefixes[0], "0.7", prefixes[1]],
        "8,2,0",
        (40, 10, 0),
        config=config,
        word_pieces=PIECES,
        **options,
    )


def t5(prefixes: list[str], **options: Any) -> Datasets:
    config = T5DatasetConfig(48, 32, MaskingConfig(0.1, 3))
    return build_t5_datasets(
        prefixes, "8,2,0", (40, 10, 0), config=config, word_pieces=PIECES, **options
    )


def ict(prefixes: list[str], **options: Any) -> Datasets:
    return build_ict_datasets(
        prefixes,
        "8,2,0",
        (40, 10, 0),
        config=ICTDatasetConfig(32),
        word_pieces=PIECES,
        titles={prefix: f"{prefix}_title" for prefix in prefixes},
        **options,
    )


@pytest.mark.parametrize("build", [bert, t5, ict])
@pytest.mark.parametrize("far", [True, False])
def test_samples_equal_those_of_memory_mapped_files(
    prefixes: list[str],
    tmp_path: Path,
    build: Callable[..., Datasets],
    far: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = build(prefixes)
    mapped: list[str] = []
    tokens = IndexedDataset.__init__

    def opened(self: IndexedDataset, *words: Any) -> None:
        tokens(self, *words)
        mapped.extend([self.prefix] if isinstance(self._tokens, np.ndarray) else [])

    monkeypatch.setattr(IndexedDataset, "__init__", opened)
    there = (
        build(
            [f"memory://bucket/{Path(prefix).name}" for prefix in prefixes],
            storage=StorageCache(str(tmp_path / "cache"), 64, 2000),
        )
        if far
        else build(prefixes, mmap=False)
    )
    assert not mapped
    for ours, others in zip(here[:2], there[:2], strict=True):
        assert ours is not None
        assert others is not None
        assert len(ours) == len(others) >= 10
        for number in range(len(ours)):
            one, other = ours[number], others[number]
            assert one.keys() == other.keys()
            assert all(np.array_equal(one[name], other[name]) for name in one)
