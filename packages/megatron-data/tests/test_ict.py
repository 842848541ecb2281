"""Samples of the inverse cloze task, against samples built by hand from the rows of the map."""

from pathlib import Path

import numpy as np
import pytest
from megatron_data import (
    DataError,
    EmptySplitError,
    ICTDatasetConfig,
    IndexedDataset,
    IndexedDatasetBuilder,
    build_ict_datasets,
)
from megatron_data.datasets import WordPieces

PIECES = WordPieces(np.zeros(200, bool), cls_id=1, sep_id=2, mask_id=3)
LENGTH = 24


@pytest.fixture
def prefixes(tmp_path: Path) -> tuple[str, str]:
    """Returns prefixes of 30 documents of sentences and of their titles: one empty, one long."""
    random = np.random.default_rng(0)
    texts, titles = str(tmp_path / "texts"), str(tmp_path / "titles")
    with (
        IndexedDatasetBuilder(texts, "uint16") as text,
        IndexedDatasetBuilder(titles, "uint16") as title,
    ):
        for number in range(30):
            for _ in range(int(random.integers(2, 9))):
                words = random.integers(10, 100, random.integers(1, 12))
                text.add_item(np.where(words < 20, 0, words))  # 0 is [PAD] in BERT's vocabulary
            text.end_document()
            length = {3: 0, 4: 40}.get(number, int(random.integers(1, 5)))
            if length:
                title.add_item(random.integers(100, 200, length).tolist())
            title.end_document()
        text.finalize()
        title.finalize()
    return texts, titles


@pytest.mark.parametrize("with_titles", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_samples_are_blocks_and_one_of_their_sentences(
    prefixes: tuple[str, str], share: float, with_titles: bool
) -> None:
    config = ICTDatasetConfig(LENGTH, share)
    texts, titles = prefixes
    splits = build_ict_datasets(
        texts,
        "70,30,0",
        (200, None, 0),
        config=config,
        word_pieces=PIECES,
        titles={texts: titles} if with_titles else None,
    )
    inside, seen = 0, set()
    with IndexedDataset(texts) as sentences, IndexedDataset(titles) as names:
        for number, dataset in enumerate(splits[:2]):
            assert dataset is not None
            for at in range(len(dataset)):
                sample = dataset[at]
                first, last, document, _ = sample["block_data"].tolist()
                seen.add((number, document))
                bounds = sentences.document_indices[document : document + 2].tolist()
                assert bounds[0] <= first < last <= bounds[1]
                block = [sentences.get(n).tolist() for n in range(first, last)]
                title = names.document(document)[: config.title_length].tolist()
                head = [1, *title, 2] if with_titles else [1]
                query = _text(sample, "query")
                assert query[0] == 1 and query[-1] == 2 and query[1:-1] in block
                wholes = [
                    [token for n, one in enumerate(block) if n != out for token in one]
                    for out in (None, *(n for n, one in enumerate(block) if one == query[1:-1]))
                ]
                room = LENGTH - len(head) - 1
                contexts = [[*head, *whole[:room], 2] for whole in wholes]
                assert _text(sample, "context") in contexts
                inside += _text(sample, "context") == contexts[0]
        total = sum(map(len, filter(None, splits)))
    assert {document < 21 for split, document in seen if split == 0} == {True}
    assert {document >= 21 for split, document in seen if split == 1} == {True}
    assert inside == total if share == 1 else abs(inside / total - share) < 0.15


def _text(sample: dict[str, np.ndarray], side: str) -> list[int]:
    return sample[f"{side}_tokens"][sample[f"{side}_document_ids"] == 0].tolist()


def test_a_sample_does_not_depend_on_earlier_reads(prefixes: tuple[str, str]) -> None:
    options = {"config": ICTDatasetConfig(LENGTH, 0.5), "word_pieces": PIECES}
    forward, backward = (
        build_ict_datasets(prefixes[0], "1,0,0", (100, 0, 0), **options).train for _ in range(2)
    )
    assert forward is not None and backward is not None
    samples = [forward[number] for number in range(100)]
    for number in reversed(range(100)):
        for key, value in backward[number].items():
            np.testing.assert_array_equal(value, samples[number][key])


def test_titles_of_another_dataset_are_refused(
    prefixes: tuple[str, str], write_dataset, tmp_path: Path
) -> None:
    options = {"config": ICTDatasetConfig(LENGTH), "word_pieces": PIECES, "sizes": (10, 0, 0)}
    few = write_dataset([[1], [2]], "few")
    with pytest.raises(DataError, match="few has 2 titles for 30 documents"):
        build_ict_datasets(prefixes[0], titles={prefixes[0]: few}, **options)
    with pytest.raises(DataError, match="no titles for"):
        build_ict_datasets(prefixes[0], titles={"other": few}, **options)
    with pytest.raises(DataError, match="give at least 5"):
        ICTDatasetConfig(4)


def test_the_only_sentence_of_a_document_is_its_block_if_that_is_allowed(write_dataset) -> None:
    prefix = write_dataset([[10 + number] * 3 for number in range(8)])
    options = {"word_pieces": PIECES, "sizes": (None, 0, 0)}
    config = ICTDatasetConfig(LENGTH, 0.0, use_one_sentence_documents=True)
    train = build_ict_datasets(prefix, "1,0,0", config=config, **options).train
    assert train is not None and len(train) == 8
    for sample in (train[number] for number in range(8)):
        word = 10 + int(sample["block_data"][2])
        assert _text(sample, "query") == _text(sample, "context") == [1, word, word, word, 2]
    with pytest.raises(EmptySplitError, match="none of 8 documents has at least 2 sentences"):
        build_ict_datasets(prefix, "1,0,0", config=ICTDatasetConfig(LENGTH), **options)
    for number in (-1, 8):
        with pytest.raises(IndexError, match=f"sample {number} is out of range; there are 8 samp"):
            train[number]
