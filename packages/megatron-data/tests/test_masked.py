"""Sentence maps and samples of BERT and T5, against hand-computed cases and invariants."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_data import (
    BertDatasetConfig,
    DataError,
    EmptySplitError,
    T5DatasetConfig,
    build_bert_datasets,
    build_t5_datasets,
)
from megatron_data.datasets import MaskingConfig, WordPieces
from megatron_data.datasets.masking import mask_tokens
from megatron_data.datasets.t5 import T5Dataset
from megatron_data.order import sentence_map
from megatron_data.order.mersenne import mt19937, mt19937_64

Write = Callable[..., str]

PIECES = WordPieces(
    np.arange(100) % 4 == 3, 0, 1, 2, bos_id=4, eos_id=5, sentinel_ids=(6, 8, 9, 10)
)


@pytest.fixture
def sentences(tmp_path):
    """Returns the prefix of a dataset of 30 documents of sentences."""
    from megatron_data import IndexedDatasetBuilder

    random = np.random.default_rng(0)
    with IndexedDatasetBuilder(str(tmp_path / "d"), "uint16") as builder:
        for _ in range(30):
            for _ in range(random.integers(2, 9)):
                builder.add_item(random.integers(12, 100, random.integers(1, 12)).tolist())
            builder.end_document()
        builder.finalize()
    return str(tmp_path / "d")


def test_mersenne_twisters_equal_the_standard() -> None:
    """The C++ standard specifies the 10,000th number for the default seed."""
    assert next(mt19937(5489))[9999] == 4123659995
    assert next(mt19937(5489 + 2**32))[9999] == 4123659995  # of 32 bits
    assert len(next(mt19937(5489))) == 16_384
    assert mt19937_64(5489, 10_000)[-1] == 9981545732273789042


def test_the_map_of_a_small_corpus() -> None:
    """The expected values come from megatron-core's compiled helper."""
    rows = sentence_map(
        np.array([0, 3, 5, 9]),
        np.array([6, 4, 9, 12, 5, 3, 8, 7, 10], np.int32),
        max_length=16,
        short_probability=0.1,
        seed=1234,
        min_sentences=2,
    )
    assert rows.tolist() == [[5, 9, 16], [3, 5, 16], [0, 3, 16]]


def test_a_corpus_without_usable_documents_is_refused() -> None:
    with pytest.raises(EmptySplitError, match="none of 2 documents has at least 2 sentences"):
        sentence_map(
            np.array([0, 1, 3]),
            np.array([5, 600, 5], np.int32),
            max_length=16,
            short_probability=0.1,
            seed=1,
            num_samples=10,
            min_sentences=2,
        )


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=80),
    st.floats(0.05, 0.6),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from(["", "longer", "geometric", "permutation"]),
    st.integers(0, 1000),
)
def test_masking(
    tokens: list[int], share: float, ngrams: int, whole: bool, kind: str, seed: int
) -> None:
    config = MaskingConfig(
        share,
        ngrams,
        whole,
        longer_ngrams=kind == "longer",
        geometric=kind == "geometric",
        permutation=kind == "permutation",
    )

    def hide():
        return mask_tokens(
            tokens, len(tokens), np.random.RandomState(seed), config, PIECES, lambda: PIECES.mask_id
        )

    masked = hide()
    assert masked == hide()
    assert masked.positions == sorted(set(masked.positions))
    assert masked.labels == [tokens[position] for position in masked.positions]
    spanned = [position for span in masked.spans for position in span.positions]
    assert len(set(spanned)) == len(spanned) <= max(1, round(len(tokens) * share))
    untouched = set(range(len(tokens))) - set(masked.positions)
    assert all(masked.tokens[position] == tokens[position] for position in untouched)
    assert all(masked.tokens[position] == PIECES.mask_id for position in spanned)
    assert not {PIECES.cls_id, PIECES.sep_id} & set(masked.labels)
    if kind != "permutation":
        assert set(spanned) == set(masked.positions)
    if whole:  # a continuation is masked with the token before it
        for position in spanned:
            before = position - 1
            if PIECES.continuations[tokens[position]] and before >= 0 and tokens[before] > 1:
                assert before in spanned


def test_bert_samples(sentences: str) -> None:
    config = BertDatasetConfig(32)
    train = build_bert_datasets(
        sentences, "1,0,0", (400, 0, 0), config=config, word_pieces=PIECES, seed=7
    ).train
    assert train is not None
    samples = [train[number] for number in range(len(train))]
    assert len(samples) >= 400
    for sample in samples:
        length = int((sample["document_ids"] == 0).sum())
        assert not sample["tokens"][length:].any()
        assert sample["tokens"][0] == PIECES.cls_id
        assert sample["tokens"][length - 1] == PIECES.sep_id
        assert sample["token_types"][: length - 1].tolist() == sorted(
            sample["token_types"][: length - 1]
        )
        assert not sample["labels"][sample["loss_mask"] == 0].any()
    share = sum(sample["loss_mask"].sum() for sample in samples)
    share /= sum((sample["document_ids"] == 0).sum() for sample in samples)
    assert 0.1 < share < 0.16  # samples below their target length round down
    wrong = np.mean([sample["is_random"] for sample in samples])
    assert 0.4 < wrong < 0.6
    hidden = np.concatenate([sample["tokens"][sample["loss_mask"] > 0] for sample in samples])
    assert 0.75 < np.mean(hidden == PIECES.mask_id) < 0.85
    again = train[3]
    assert all(np.array_equal(again[key], samples[3][key]) for key in again)
    with pytest.raises(IndexError, match="sample 100000"):
        train[100_000]


def test_permuted_tokens_are_others_than_the_masked_ones_and_as_many() -> None:
    """A fifth of 60 tokens is masked, and a fifth permuted among themselves."""
    tokens = list(range(12, 72))
    config = MaskingConfig(0.2, 2, permutation=True)
    moved = 0
    for seed in range(20):
        random = np.random.RandomState(seed)
        masked = mask_tokens(tokens, 60, random, config, PIECES, lambda: PIECES.mask_id)
        hidden = {position for span in masked.spans for position in span.positions}
        others = [position for position in masked.positions if position not in hidden]
        assert len(masked.positions) == len(set(masked.positions)) == len(hidden) + len(others)
        assert len(hidden) == len(others) == 12
        assert {tokens[at] for at in others} == {masked.tokens[at] for at in others}
        moved += sum(masked.tokens[at] != tokens[at] for at in others)
    assert moved > 180  # of 240; about one of each sample stays


def joined(parts: list[list[int]]) -> list[int]:
    return [token for part in parts for token in part]


def megatrons_segments(
    parts: list[list[int]], target: int, head: bool, draws: np.random.RandomState
) -> tuple[bool, list[list[int]]]:
    """Draws in the order of `BERTMaskedWordPieceDataset.__getitem__` of megatron-core."""
    pivot, swapped = len(parts), False
    if head:
        pivot = draws.randint(1, len(parts)) if len(parts) > 2 else 1
        swapped = bool(draws.random_sample() < 0.5)
    segments = [joined(parts[:pivot]), joined(parts[pivot:])]
    if swapped:
        segments.reverse()
    while sum(map(len, segments)) > target:
        longer = segments[0] if len(segments[0]) > len(segments[1]) else segments[1]
        del longer[0 if draws.random_sample() < 0.5 else -1]
    return swapped, segments


@pytest.mark.parametrize("head", [True, False])
def test_a_bert_sample_is_what_its_sentences_have_room_for(sentences: str, head: bool) -> None:
    """Two segments are sentences before and after a point; the longer one loses tokens."""
    config = BertDatasetConfig(32, binary_head=head)
    train = build_bert_datasets(
        sentences, "1,0,0", (150, 0, 0), config=config, word_pieces=PIECES, seed=7
    ).train
    assert train is not None
    for number in range(len(train)):
        sample = train[number]
        first, last, target = map(int, train.sample_map[number])
        parts = [train.source.get(sentence).tolist() for sentence in range(first, last)]
        hidden = np.where(sample["loss_mask"] > 0, sample["labels"], sample["tokens"])
        text = hidden[sample["document_ids"] == 0].tolist()
        ends = [at for at, token in enumerate(text) if token == PIECES.sep_id]
        assert (text[0], len(ends), ends[-1]) == (PIECES.cls_id, 1 + head, len(text) - 1)
        found = [text[begin + 1 : end] for begin, end in zip([0, *ends], ends, strict=False)]
        types = sample["token_types"][: len(text)].tolist()
        assert types == [0] * (ends[0] + 1) + [1] * (len(text) - ends[0] - 1)
        assert sum(map(len, found)) == min(sum(map(len, parts)), target)
        draws = np.random.RandomState(7 + number)
        swapped, segments = megatrons_segments(parts, target, head, draws)
        assert (sample["is_random"], found) == (swapped, segments[: 1 + head])


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_samples_say_whether_sentences_were_truncated(sentences: str, kind: str) -> None:
    train = (
        build_bert_datasets(
            sentences,
            "1,0,0",
            (200, 0, 0),
            config=BertDatasetConfig(32),
            word_pieces=PIECES,
            seed=7,
        )
        if kind == "bert"
        else build_t5_datasets(
            sentences,
            "1,0,0",
            (200, 0, 0),
            config=T5DatasetConfig(48, 32, MaskingConfig(0.1, 3)),
            word_pieces=PIECES,
            seed=7,
        )
    ).train
    assert train is not None
    seen = set()
    for number in range(len(train)):
        first, last, target = (int(value) for value in train.sample_map[number])
        tokens = sum(len(train.source.get(sentence)) for sentence in range(first, last))
        assert train[number]["truncated"] == (tokens > target)
        seen.add(tokens - target)
    assert {-1, 0, 1} <= {max(-1, min(1, extra)) for extra in seen}


def test_t5_samples_can_be_reassembled(sentences: str) -> None:
    config = T5DatasetConfig(48, 32, MaskingConfig(0.1, 3))
    train = build_t5_datasets(
        sentences, "1,0,0", (100, 0, 0), config=config, word_pieces=PIECES, seed=7
    ).train
    assert train is not None
    for number in range(100):
        sample = train[number]
        labels = sample["labels"][sample["loss_mask"] > 0].tolist()
        assert labels[-1] == PIECES.eos_id
        assert sample["decoder_tokens"][: len(labels)].tolist() == [PIECES.bos_id, *labels[:-1]]
        spans: dict[int, list[int]] = {}
        for token in labels[:-1]:
            if token in PIECES.sentinel_ids:
                spans[token] = last = []
            else:
                last.append(token)
        whole = []
        for token in sample["encoder_tokens"][sample["encoder_document_ids"] == 0].tolist():
            whole += spans.get(token, [token])
        assert not set(whole) & set(PIECES.sentinel_ids)
        assert len(whole) <= 46


def test_a_t5_sample_may_fill_its_encoder_its_decoder_and_the_sentinels(sentences: str) -> None:
    masking = MaskingConfig(0.1, 3)
    config = T5DatasetConfig(48, 32, masking)
    train = build_t5_datasets(
        sentences, "1,0,0", (100, 0, 0), config=config, word_pieces=PIECES, seed=7
    ).train
    assert train is not None
    masked = [len(set(train[at]["labels"].tolist()) & {*PIECES.sentinel_ids}) for at in range(40)]
    at = int(np.argmax(masked))
    sizes = [int((train[at][f"{side}_document_ids"] == 0).sum()) for side in ("encoder", "decoder")]

    def read(length: int, decoder_length: int, sentinels: int) -> list[list[int]]:
        pieces = replace(PIECES, sentinel_ids=PIECES.sentinel_ids[:sentinels])
        config = T5DatasetConfig(length, decoder_length, masking)
        sample = T5Dataset(train.source, train.sample_map, config, pieces, train.seed)[at]
        return [sample[f"{side}_tokens"].tolist() for side in ("encoder", "decoder")]

    exact = [*sizes, masked[at]]
    assert masked[at] > 1
    assert read(*exact) == [
        train[at][f"{side}_tokens"][:size].tolist()
        for side, size in zip(("encoder", "decoder"), sizes, strict=True)
    ]
    for which, message in enumerate(
        (
            f"{sizes[0]} tokens for the encoder, which has room for {sizes[0] - 1};",
            f"{sizes[1]} tokens for the decoder, which has room for {sizes[1] - 1};",
            f"{masked[at]} masked spans, but the tokenizer has {masked[at] - 1} sentinels",
        )
    ):
        less = [size - (number == which) for number, size in enumerate(exact)]
        with pytest.raises(DataError, match=rf"sample {at} has {message}"):
            read(*less)


def test_refusals(sentences: str) -> None:
    for bad in (
        lambda: MaskingConfig(0.0),
        lambda: MaskingConfig(max_ngram=0),
        lambda: MaskingConfig(geometric=True, permutation=True),
        lambda: BertDatasetConfig(4),
        lambda: BertDatasetConfig(40, short_probability=1.5),
        lambda: T5DatasetConfig(40, 2),
    ):
        with pytest.raises(DataError, match=r"give|exclude"):
            bad()
    plain = WordPieces(PIECES.continuations, 0, 1, 2)
    with pytest.raises(DataError, match="need sentinels"):
        build_t5_datasets(
            sentences, "1,0,0", (9, 0, 0), config=T5DatasetConfig(40, 40), word_pieces=plain
        )
    tight = build_t5_datasets(
        sentences,
        "1,0,0",
        (40, 0, 0),
        config=T5DatasetConfig(40, 6, MaskingConfig(0.5)),
        word_pieces=PIECES,
    ).train
    assert tight is not None
    with pytest.raises(
        DataError, match=r"masked spans, but the tokenizer has 4|tokens for the decoder"
    ):
        for number in range(len(tight)):
            tight[number]
    few = WordPieces(PIECES.continuations[:20], 0, 1, 2)
    with pytest.raises(DataError, match="but the vocabulary has 20 tokens"):
        build_bert_datasets(
            sentences, "1,0,0", (9, 0, 0), config=BertDatasetConfig(40), word_pieces=few
        ).train[0]  # type: ignore[index]


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_token_0_in_the_text_is_not_padding(tmp_path, kind: str) -> None:
    """Token 0 is [PAD] in BERT's vocabulary, but only tokens after the text are padding."""
    from megatron_data import IndexedDatasetBuilder

    pieces = WordPieces(np.zeros(40, bool), 1, 2, 3, bos_id=4, eos_id=5, sentinel_ids=(6, 7, 8, 9))
    random = np.random.default_rng(0)
    with IndexedDatasetBuilder(str(tmp_path / "d"), "uint16") as builder:
        for _ in range(20):
            for _ in range(3):
                builder.add_item(np.where(random.random(5) < 0.5, 0, random.integers(10, 40, 5)))
            builder.end_document()
        builder.finalize()
    prefix, sizes = str(tmp_path / "d"), (20, 0, 0)
    if kind == "bert":
        config = BertDatasetConfig(24)
        train = build_bert_datasets(prefix, "1,0,0", sizes, config=config, word_pieces=pieces).train
    else:
        settings = T5DatasetConfig(24, 24, MaskingConfig(max_ngram=2))
        train = build_t5_datasets(prefix, "1,0,0", sizes, config=settings, word_pieces=pieces).train
    assert train is not None
    zeros = 0
    for sample in train:
        lengths = {}
        for ids in (name for name in sample if name.endswith("document_ids")):
            is_text = sample[ids] == 0
            lengths[ids] = int(is_text.sum())
            assert is_text[: lengths[ids]].all(), "text, then padding"
            zeros += int((sample[ids.replace("document_ids", "tokens")][is_text] == 0).sum())
        if kind == "bert":
            assert sample["tokens"][lengths["document_ids"] - 1] == pieces.sep_id
        else:
            assert lengths["decoder_document_ids"] == sample["loss_mask"].sum()
    assert zeros > 20
