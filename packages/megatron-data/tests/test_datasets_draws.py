"""Random draws of samples, and which data, number of samples and order the splits get."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from megatron_data import (
    BertDatasetConfig,
    DataError,
    EmptySplitError,
    HuggingFaceTokenizer,
    ICTDatasetConfig,
    IndexedDatasetBuilder,
    T5DatasetConfig,
    build_bert_datasets,
    build_gpt_datasets,
    build_ict_datasets,
    build_t5_datasets,
    train_bpe,
)
from megatron_data.datasets import FillInTheMiddle, FIMConfig, LabelledText, WordPieces, split_rows
from megatron_data.datasets.bert import BertDataset
from megatron_data.datasets.masking import MaskingConfig, mask_tokens
from megatron_data.datasets.sentences import sample_generator
from megatron_data.datasets.t5 import T5Dataset
from megatron_data.order.permutation import hash_integers

Write = Callable[..., str]
PIECES = WordPieces(np.zeros(100, bool), 0, 1, 2)


@pytest.mark.parametrize(
    ("seed", "sample", "expected"),
    [(7, 3, 10), (2**32 - 2, 1, 2**32 - 1), (2**32 - 2, 2, 0), (2**31, 5, 2**31 + 5)],
)
def test_the_generator_of_a_sample_has_the_sum_of_seed_and_index(
    seed: int, sample: int, expected: int
) -> None:
    found = sample_generator(seed, sample).randint(0, 1 << 30, 4)
    assert found.tolist() == np.random.RandomState(expected).randint(0, 1 << 30, 4).tolist()


def test_hidden_tokens_of_bert_are_masked_drawn_or_kept_as_in_megatron() -> None:
    """Draws in the order of `BERTMaskedWordPieceDataset` of megatron-core: 80, 10 and 10 %."""
    text = list(range(10, 90))
    source: Any = SimpleNamespace(get=lambda number: np.array(text))
    config = BertDatasetConfig(90, MaskingConfig(0.5, max_ngram=1), binary_head=False)
    rows = np.array([[0, 1, 87]] * 30, np.uint32)
    dataset, seen = BertDataset(source, rows, config, PIECES, seed=5), set()
    for number in range(30):
        sample, draws = dataset[number], np.random.RandomState(5 + number)
        order = np.arange(80)
        draws.shuffle(order)
        expected = [0, *text, 1]
        for word in order[: round(0.5 * 82)]:
            draws.random_sample()  # the number of words in a span
            if draws.random_sample() < 0.8:
                expected[word + 1], kind = 2, "masked"
            elif draws.random_sample() < 0.5:
                kind = "kept"
            else:
                expected[word + 1], kind = draws.randint(0, 100), "drawn"
            seen.add(kind)
            assert sample["labels"][word + 1] == text[word]
        assert sample["tokens"].tolist() == expected + [0] * 8
        assert sample["loss_mask"].sum() == 41
    assert seen == {"masked", "kept", "drawn"}


def test_permuted_tokens_are_drawn_after_the_masked_ones() -> None:
    """In the order of Megatron's `create_masked_lm_predictions`, with spans of one token."""
    text, config = list(range(20, 60)), MaskingConfig(0.2, max_ngram=1, permutation=True)
    for seed in range(5):
        found = mask_tokens(text, 40, np.random.RandomState(seed), config, PIECES, lambda: 2)
        draws, order = np.random.RandomState(seed), np.arange(40)
        draws.shuffle(order)
        masked = order[:8].tolist()
        draws.random_sample(8)  # the number of tokens in a span
        draws.shuffle(order)
        others: list[int] = []
        for position in order.tolist():
            if len(others) < 8:
                draws.random_sample()
                others += [] if position in masked else [position]
        sources = np.sort(others)
        draws.shuffle(sources)
        expected = [2 if at in masked else token for at, token in enumerate(text)]
        for position, source in zip(sorted(others), sources.tolist(), strict=True):
            expected[position] = text[source]
        assert found.tokens == expected
        assert found.positions == sorted([*masked, *others])


@pytest.mark.parametrize("lacking", ["[CLS]", "[SEP]", "[MASK]"])
def test_word_pieces_need_each_special_token_of_bert(lacking: str, texts: list[str]) -> None:
    special = [name for name in ("[CLS]", "[SEP]", "[MASK]") if name != lacking]
    trained = tokenizers.Tokenizer.from_str(train_bpe(texts[:9], 270).definition.decode())
    trained.add_special_tokens(special)
    with pytest.raises(DataError, match=r"the tokenizer lacks \[CLS\], \[SEP\] or \[MASK\]"):
        WordPieces.from_tokenizer(HuggingFaceTokenizer(trained.to_str(), {"eod": special[0]}))


@pytest.mark.parametrize("token", [0, 99, 100, -1])
def test_tokens_of_a_vocabulary_of_100_are_0_to_99(token: int) -> None:
    def mask() -> list[int]:
        random = np.random.RandomState(1)
        return mask_tokens([5, token], 2, random, MaskingConfig(), PIECES, lambda: None).tokens

    if 0 <= token < 100:
        assert mask() == [5, token]
        return
    with pytest.raises(DataError, match=f"has tokens {min(5, token)} to {max(5, token)}, but the"):
        mask()


def test_fill_in_the_middle_draws_from_a_hash_of_seed_and_sample() -> None:
    """The hash has more than 32 bits, of which numpy's generator takes 32."""
    tokenizer: Any = SimpleNamespace(
        eod_id=None,
        encode=lambda text: [ord(text[5])] if text.startswith("<fim_") else [*map(ord, text)],
        encode_batch=lambda texts: [[*map(ord, text)] for text in texts],
        decode=lambda ids: "".join(map(chr, ids)),
    )
    text = np.array([*map(ord, "what is rearranged")], np.int64)
    infill = FillInTheMiddle(FIMConfig(rate=1.0), tokenizer)
    assert infill.seed == 1234
    for sample in range(8):
        draws = np.random.RandomState(hash_integers(1234, sample) % 2**32)
        draws.random_sample()  # whether the document is rearranged
        expected = infill.rearrange(text, draws).tolist()
        assert infill(text, sample, 99).tolist() == expected
        assert infill(text, sample, 12).tolist() == expected[:12]


def test_the_division_of_a_table_stays_the_same() -> None:
    """It is numpy's permutation of seed 0; rows for a test never become rows for training."""
    rows = [LabelledText((str(number),), "x", f"f:{number}") for number in range(50)]
    order = np.random.default_rng(0).permutation(50).tolist()
    for split, first, last in (("80,10,10", 40, 45), ("1,0,0", 50, 50), ("0,1,1", 0, 25)):
        found = [[int(row.texts[0]) for row in part] for part in split_rows(rows, split)]
        assert found == [order[:first], order[first:last], order[last:]]


@pytest.mark.parametrize("order", ["stateless", "compat"])
def test_splits_of_a_mapping_have_whole_datasets(write_dataset: Write, order: Any) -> None:
    data = {
        "train": ["1", write_dataset([[1] * 9] * 20, "a"), "1", write_dataset([[2] * 9] * 20, "b")],
        "test": write_dataset([[3] * 9] * 20, "c"),
    }
    train, valid, test = build_gpt_datasets(data, None, (8, 8, None), 4, order=order)
    assert train is not None and test is not None and valid is None
    assert {int(train[at]["tokens"][0]) for at in range(8)} == {1, 2}
    assert len(test) == (9 * 20 - 1) // 4 and set(test[7]["tokens"].tolist()) == {3}
    assert {len(array) for array in test.batch([7]).values()} == {1}  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="--split is required if all splits come from the same"):
        build_gpt_datasets(data["test"], None, (8, 0, 0), 4, order=order)


@pytest.mark.parametrize(("size", "expected"), [(None, 88), (87, 87), (88, 88), (89, 88)])
def test_megatrons_order_ends_with_the_data_of_a_blend_without_weights(
    write_dataset: Write, tmp_path: Path, size: int | None, expected: int
) -> None:
    data = [write_dataset([[1] * 9] * 20, "a"), write_dataset([[2] * 9] * 20, "b")]
    train = build_gpt_datasets(data, "1,0,0", (size, 0, 0), 4, order="compat").train
    assert train is not None and len(train) == expected  # 44 samples of 179 tokens, twice


@pytest.mark.parametrize("lacking", ["bos_id", "eos_id", "sentinel_ids"])
def test_t5_needs_ends_of_sequences_and_sentinels(lacking: str) -> None:
    pieces = replace(PIECES, bos_id=3, eos_id=4, sentinel_ids=(5, 6))
    arguments: Any = (None, np.zeros((1, 3)), T5DatasetConfig(9, 9))
    T5Dataset(*arguments, pieces, 1)
    without = () if lacking == "sentinel_ids" else None
    with pytest.raises(DataError, match="T5 samples need sentinels and tokens for the beginning"):
        T5Dataset(*arguments, replace(pieces, **{lacking: without}), 1)


@pytest.fixture
def sentences(tmp_path: Path) -> str:
    """Returns the prefix of 8 documents: of one sentence, of none, and 6 of two sentences."""
    with IndexedDatasetBuilder(tmp_path / "s", "uint16") as builder:
        for number, count in enumerate([1, 0, 2, 2, 2, 2, 2, 2]):
            words = [10 * number + 10, 10 * number + 11, 10 * number + 12]
            builder.add_document(words * count, [3] * count)
        builder.finalize()
    return str(tmp_path / "s")


def test_documents_of_one_sentence_are_samples_of_t5_but_not_of_bert(sentences: str) -> None:
    pieces = WordPieces(np.zeros(100, bool), 0, 1, 2, 3, 4, (5, 6, 7, 8))
    config = T5DatasetConfig(40, 40, MaskingConfig(max_ngram=1))
    t5 = build_t5_datasets(sentences, "1,0,0", config=config, word_pieces=pieces).train
    assert t5 is not None and len(t5) == 7
    options: dict[str, Any] = {"config": BertDatasetConfig(40), "word_pieces": pieces}
    bert = build_bert_datasets(sentences, "1,0,0", **options).train
    assert bert is not None and len(bert) == 6
    empty = r"valid split of .*s \(1 of 8 documents\): none of 1 documents has at least 2 sentences"
    with pytest.raises(EmptySplitError, match=empty):
        build_bert_datasets(sentences, "1,1,6", (0, None, 0), **options)


def test_the_query_is_taken_out_of_a_block_of_two_sentences(sentences: str) -> None:
    config = ICTDatasetConfig(20, query_in_block_probability=0.0)
    train = build_ict_datasets(sentences, "1,0,0", config=config, word_pieces=PIECES).train
    assert train is not None and len(train) == 6
    for sample in (train[number] for number in range(6)):
        word = 10 * int(sample["block_data"][2]) + 10
        for side in ("query", "context"):
            text = sample[f"{side}_tokens"][sample[f"{side}_document_ids"] == 0].tolist()
            assert text == [0, word, word + 1, word + 2, 1]
