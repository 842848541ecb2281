"""Maps of sentences, and samples of BERT and T5, equal those of megatron-core."""

import json
from typing import ClassVar

import numpy as np
import pytest

helpers = pytest.importorskip("megatron.core.datasets.helpers")

import torch.distributed as dist  # noqa: E402
from megatron.core.datasets.bert_dataset import (  # noqa: E402
    BERTMaskedWordPieceDataset,
    BERTMaskedWordPieceDatasetConfig,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset as TheirIndexed  # noqa: E402
from megatron.core.datasets.t5_dataset import (  # noqa: E402
    T5MaskedWordPieceDataset,
    T5MaskedWordPieceDatasetConfig,
)
from megatron.core.datasets.utils import Split  # noqa: E402
from megatron_data import (  # noqa: E402
    BertDatasetConfig,
    DataError,
    EmptySplitError,
    T5DatasetConfig,
    build_bert_datasets,
    build_t5_datasets,
    preprocess,
)
from megatron_data.datasets import MaskingConfig, WordPieces  # noqa: E402
from megatron_data.order import block_map, sentence_map  # noqa: E402
from megatron_data.tokenizers import NullTokenizer  # noqa: E402

MANY_EPOCHS = 2**31 - 2
VOCABULARY = {i: f"{'##' if i >= 20 and i % 3 == 0 else ''}w{i}" for i in range(200)}
SENTINELS = tuple(range(6, 16))
PIECES = WordPieces(
    np.array([word.startswith("##") for word in VOCABULARY.values()]),
    cls_id=1,
    sep_id=2,
    mask_id=3,
    bos_id=4,
    eos_id=5,
    sentinel_ids=SENTINELS,
)


class StandInTokenizer:
    """The interface of a tokenizer that megatron-core's datasets need."""

    cls, sep, mask, pad, bos, eos = 1, 2, 3, 0, 4, 5

    def __init__(self) -> None:
        self.inv_vocab = VOCABULARY
        self.additional_special_tokens_ids = list(SENTINELS)
        self.unique_identifiers = {"name": "stand-in"}


def corpus_of(random: np.random.Generator, longest: int):
    """Returns bounds of documents, and lengths of their sentences and titles."""
    documents = int(random.integers(1, 30))
    bounds = np.concatenate([[0], np.cumsum(random.integers(0, 12, documents))]).astype(np.int64)
    lengths = random.integers(0, longest, bounds[-1]).astype(np.int32)
    return bounds, lengths, random.integers(0, 10, documents).astype(np.int32)


def test_maps_of_random_corpora_equal() -> None:
    random = np.random.default_rng(0)
    compared = 0
    for trial in range(200):
        bounds, lengths, titles = corpus_of(random, (20, 60, 600)[trial % 3])
        length, samples = (int(n) for n in random.integers(3, 200, 2))
        short, least, seed = (0.0, 0.1, 0.5, 0.3, 1.0)[trial % 5], 1 + trial % 2, 1 + trial
        try:
            ours = sentence_map(
                bounds,
                lengths,
                max_length=length,
                short_probability=short,
                seed=seed,
                num_samples=samples,
                min_sentences=least,
            )
        except EmptySplitError:  # megatron-core would loop forever
            continue
        theirs = helpers.build_mapping(
            bounds, lengths, MANY_EPOCHS, samples, length, short, seed, False, least
        )
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
        compared += 1
        one = least == 1
        blocks = block_map(
            bounds,
            lengths,
            titles,
            max_length=length + 10,
            seed=seed,
            num_samples=samples,
            use_one_sentence_blocks=one,
        )
        theirs = helpers.build_blocks_mapping(
            bounds, lengths, titles, MANY_EPOCHS, samples, length + 10, seed, False, one
        )
        assert blocks.dtype == theirs.dtype
        np.testing.assert_array_equal(blocks, theirs)
    assert compared > 190


class LineSplitter:
    """Splits a text into lines as its sentences."""

    record: ClassVar = {"splitter": "lines"}

    def split(self, text: str) -> list[str]:
        return text.splitlines()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """Returns preprocessed sentences; starts the process group that megatron-core needs."""
    folder = tmp_path_factory.mktemp("sentences")
    random = np.random.default_rng(1)
    with (folder / "d.jsonl").open("w") as lines:
        for _ in range(60):
            sentences = [
                " ".join(map(str, random.integers(16, 200, random.integers(1, 30))))
                for _ in range(random.integers(0, 9))
            ]
            lines.write(json.dumps({"text": "\n".join(sentences)}) + "\n")
    (made,) = preprocess(
        [folder / "d.jsonl"], folder / "d", NullTokenizer(200), splitter=LineSplitter()
    )
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    yield made.prefix
    dist.destroy_process_group()


def theirs_of(kind, configuration, prefix: str, cache, samples: int, trial: int, **options):
    config = configuration(
        random_seed=100 + trial,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=str(cache / str(trial)),
        tokenizer=StandInTokenizer(),
        short_sequence_probability=(0.1, 0.0, 0.5)[trial % 3],
        masking_do_full_word=trial % 4 > 0,
        masking_do_permutation=False,
        **options,
    )
    documents = np.arange(60, dtype=np.int32)
    return kind(TheirIndexed(prefix), prefix, documents, samples, Split.train, config)


def check_padding(document_ids: np.ndarray, text: np.ndarray, mask: np.ndarray) -> None:
    """Checks padding: ours is after the text; theirs is every [PAD], even one that masks a word."""
    behind = np.arange(len(text)) > np.flatnonzero(text)[-1]
    np.testing.assert_array_equal(document_ids == -1, behind)
    np.testing.assert_array_equal(mask == 0, text == 0)


@pytest.mark.parametrize("trial", range(10))
def test_bert_samples_equal(prefix: str, tmp_path, trial: int) -> None:
    length, geometric = (64, 40, 128)[trial % 3], trial % 5 == 4
    share, ngrams, longer = (0.15, 0.3)[trial % 2], (3, 5, 1)[trial % 3], bool(trial % 2)
    theirs = theirs_of(
        BERTMaskedWordPieceDataset,
        BERTMaskedWordPieceDatasetConfig,
        prefix,
        tmp_path,
        120,
        trial,
        sequence_length=length,
        classification_head=trial % 2 == 0,
        masking_probability=share,
        masking_max_ngram=ngrams,
        masking_use_longer_ngrams=longer,
        masking_use_geometric_distribution=geometric,
    )
    masking = MaskingConfig(share, ngrams, trial % 4 > 0, longer, geometric)
    config = BertDatasetConfig(length, masking, (0.1, 0.0, 0.5)[trial % 3], trial % 2 == 0)
    ours = build_bert_datasets(
        prefix, "1,0,0", (120, 0, 0), config=config, word_pieces=PIECES, seed=100 + trial
    ).train
    assert ours is not None
    assert len(ours) == len(theirs) >= 120
    for number in range(len(ours)):
        sample, their = ours[number], theirs[number]
        for key, their_key in (("tokens", "text"), ("token_types", "types")):
            np.testing.assert_array_equal(sample[key], their[their_key])
        np.testing.assert_array_equal(sample["loss_mask"], their["loss_mask"])
        labels = np.where(sample["loss_mask"] > 0, sample["labels"], -1)
        np.testing.assert_array_equal(labels, their["labels"])
        check_padding(sample["document_ids"], their["text"], their["padding_mask"])
        assert sample["is_random"] == their["is_random"]
        assert sample["truncated"] == their["truncated"]
    assert {int(ours[number]["truncated"]) for number in range(len(ours))} == {0, 1}


@pytest.mark.parametrize("trial", range(6))
def test_t5_samples_equal(prefix: str, tmp_path, trial: int) -> None:
    length = (64, 40, 128)[trial % 3]
    theirs = theirs_of(
        T5MaskedWordPieceDataset,
        T5MaskedWordPieceDatasetConfig,
        prefix,
        tmp_path,
        120,
        trial,
        sequence_length=length,
        sequence_length_decoder=48,
        masking_probability=0.15,
        masking_max_ngram=10,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=True,
    )
    masking = MaskingConfig(0.15, 10, trial % 4 > 0, geometric=True)
    config = T5DatasetConfig(length, 48, masking, (0.1, 0.0, 0.5)[trial % 3])
    ours = build_t5_datasets(
        prefix, "1,0,0", (120, 0, 0), config=config, word_pieces=PIECES, seed=100 + trial
    ).train
    assert ours is not None
    assert len(ours) == len(theirs) >= 120
    compared = 0
    for number in range(len(ours)):
        try:
            sample = ours[number]
        except DataError:  # more spans than sentinels, or than fit into the decoder
            with pytest.raises((IndexError, AssertionError)):
                theirs[number]
            continue
        their = theirs[number]
        for side, their_side in (("encoder", "enc"), ("decoder", "dec")):
            np.testing.assert_array_equal(sample[f"{side}_tokens"], their[f"text_{their_side}"])
            text, mask = their[f"text_{their_side}"], their[f"{their_side}_mask"]
            check_padding(sample[f"{side}_document_ids"], text, mask)
        np.testing.assert_array_equal(sample["loss_mask"], their["loss_mask"])
        counted = their["loss_mask"] > 0
        np.testing.assert_array_equal(sample["labels"][counted], their["labels"][counted])
        assert sample["truncated"] == their["truncated"]
        compared += 1
    assert compared > len(ours) // 2
