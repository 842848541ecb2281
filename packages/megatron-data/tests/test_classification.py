"""Labelled texts in tables and their samples, compared with csv, json and hand-made samples."""

import csv
import json
import random

import numpy as np
import pytest
from fuzzing import fuzz, mutate_bytes
from megatron_data import ByteTokenizer, DataError, EmptySplitError
from megatron_data.datasets import (
    ClassificationDataset,
    LabelledText,
    TextColumns,
    build_classification_datasets,
    label_names,
    read_batch,
    read_labelled_texts,
    split_rows,
)
from megatron_data.tokenizers import bert_tokenizer

WORDS = ["a", "good", "bad", "film", "plot", "the", "##s"]


@pytest.fixture
def tokenizer(tmp_path):
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (tmp_path / "vocab.txt").write_text("\n".join([*special, *WORDS]) + "\n")
    return bert_tokenizer(tmp_path / "vocab.txt")


def rows(*pairs):
    return [LabelledText(texts, label, f"f:{n}") for n, (texts, label) in enumerate(pairs, 1)]


def test_tables_of_every_format_have_the_same_rows(tmp_path):
    draw = random.Random(3)
    letters = "ab ,\"'é"
    content = [
        ("".join(draw.choices(letters, k=9)) + "x", "".join(draw.choices(letters, k=5)) + "y", "1")
        for _ in range(50)
    ]
    with (tmp_path / "t.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows(
            [("one", "unused", "two", "gold"), *((a, "-", b, c) for a, b, c in content)]
        )
    (tmp_path / "t.tsv").write_text("".join(f"{a}\t{c}\t{b}\r\n" for a, b, c in content))
    lines = (json.dumps({"one": a, "two": b, "gold": int(c)}) + "\n\n" for a, b, c in content)
    (tmp_path / "t.jsonl").write_text("".join(lines))
    named, counted = TextColumns(("one", "two"), "gold"), TextColumns(("0", "2"), "1")
    for name, columns, first in (("csv", named, 2), ("tsv", counted, 1), ("jsonl", named, 1)):
        found = read_labelled_texts(tmp_path / f"t.{name}", columns)
        assert [(*row.texts, row.label) for row in found] == content, name
        assert found[0].location == f"{tmp_path}/t.{name}:{first}"


def test_a_quoted_field_may_hold_newlines_and_a_tsv_has_no_quotes(tmp_path):
    (tmp_path / "t.csv").write_text('text,label\n"two\nlines, one ""row""",0\nnext,1\n')
    first, second = read_labelled_texts(tmp_path / "t.csv")
    assert first.texts == ('two\nlines, one "row"',) and second.location.endswith(".csv:4")
    (tmp_path / "t.tsv").write_text('text\tlabel\nan "open\t0\nnext\t1\n')
    assert [r.texts[0] for r in read_labelled_texts(tmp_path / "t.tsv")] == ['an "open', "next"]


@pytest.mark.parametrize(
    ("name", "content", "columns", "message"),
    [
        ("t.tsv", "a\tb\nx\t1\n", TextColumns(("a",), "label"), "no column 'label' in the header"),
        ("t.tsv", "x\t1\ny\n", TextColumns(("0",), "1"), r"t.tsv:2: the row has 1 columns"),
        ("t.tsv", "text\tlabel\nx\t \n", TextColumns(), r"t.tsv:2: the label is empty"),
        ("t.tsv", "text\tlabel\n", TextColumns(), "has no row"),
        ("t.csv", 'text,label\n"x,1\n', TextColumns(), r"t.csv:\d: not CSV"),
        ("t.jsonl", '{"text": "x"}\n', TextColumns(), r"t.jsonl:1: no key 'label'"),
        ("t.jsonl", '{"text": 1, "label": "a"}\n', TextColumns(), "must be a string"),
        ("t.jsonl", '{"text": "x", "label": 1.5}\n', TextColumns(), "a label a string or integer"),
        ("t.jsonl", json.dumps({f"k{n}": n for n in range(25)}), TextColumns(),
         "no key 'text'; the keys are 'k0', .*, 'k19'$"),
        ("t.jsonl", "[1]\n", TextColumns(), "t.jsonl:1 is not a JSON object"),
        ("t.txt", "x", TextColumns(), "names end in .tsv"),
    ],
)  # fmt: skip
def test_wrong_tables_are_refused_with_the_line(tmp_path, name, content, columns, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        read_labelled_texts(tmp_path / name, columns)


@pytest.mark.parametrize(
    "columns", [((), "label"), (("a", "b", "c"), "d"), (("a", "a"), "b"), (("a",), "0")]
)
def test_impossible_columns_are_refused(columns):
    with pytest.raises(DataError):
        TextColumns(*columns)


@pytest.mark.parametrize("name", ["t.tsv", "t.csv", "t.jsonl"])
def test_damaged_tables_are_read_or_refused(tmp_path, name, fuzz_count):
    content = {
        "t.tsv": "text\tlabel\na film\tgood\nno plot\tbad\n",
        "t.csv": 'text,label\n"a, film",good\nno plot,bad\n',
        "t.jsonl": '{"text": "a film", "label": "good"}\n{"text": "no plot", "label": 0}\n',
    }[name]

    def read(data: bytes) -> None:
        (tmp_path / name).write_bytes(data)
        read_labelled_texts(tmp_path / name)

    fuzz(read, [content.encode()], DataError, count=fuzz_count, mutate=mutate_bytes)


def test_labels_are_ordered_by_value_if_they_are_integers():
    assert label_names(rows((("x",), "10"), (("x",), "9"), (("x",), "-1"))) == ("-1", "9", "10")
    assert label_names(rows((("x",), "spam"), (("x",), "ham"), (("x",), "9"))) == (
        "9",
        "ham",
        "spam",
    )


def test_samples_have_berts_format(tokenizer):
    cls_id, sep_id, good, film, bad = (
        tokenizer.token_id(t) for t in ("[CLS]", "[SEP]", "good", "film", "bad")
    )
    data = rows((("Good film", "bad"), "no"), (("film", ""), "yes"), (("film",), "no"))
    dataset = ClassificationDataset(data, tokenizer, {"yes": 0, "no": 1}, 8)
    expected = [
        ([cls_id, good, film, sep_id, bad, sep_id, 0, 0], [0, 0, 0, 0, 1, 1, 0, 0], 5, 1),
        ([cls_id, film, sep_id, sep_id, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0, 0], 3, 0),
        ([cls_id, film, sep_id, 0, 0, 0, 0, 0], [0] * 8, 2, 1),
    ]
    for sample, (tokens, types, last, number) in zip(
        map(dataset.__getitem__, range(3)), expected, strict=True
    ):
        assert sample["tokens"].tolist() == tokens and sample["token_types"].tolist() == types
        assert (sample["last_tokens"], sample["classes"], sample["weights"]) == (last, number, 1)
        assert sample["document_ids"].tolist() == [0 if n <= last else -1 for n in range(8)]
    batch = read_batch(dataset, [0, 2])
    assert batch["tokens"].shape == (2, 8) and batch["classes"].tolist() == [1, 1]


def test_the_longer_of_two_texts_is_truncated(tokenizer):
    data = rows((("the bad film", "a a a a a a"), "x"), (("the bad good film", "a a a a"), "x"))
    dataset = ClassificationDataset(data, tokenizer, {"x": 0}, 9)
    texts = [tokenizer.decode(dataset[n]["tokens"].tolist()) for n in range(2)]
    assert texts[0] == "[CLS] the bad film [SEP] a a a [SEP]"
    assert texts[1] == "[CLS] the bad good [SEP] a a a [SEP]"


def test_a_tokenizer_without_cls_ends_each_text_with_its_eod_token():
    tokenizer = ByteTokenizer()
    dataset = ClassificationDataset(rows((("ab", "c"), "x")), tokenizer, {"x": 0}, 6)
    eod = tokenizer.eod_id
    assert dataset[0]["tokens"].tolist()[:5] == [97, 98, eod, 99, eod]
    assert dataset[0]["last_tokens"] == 4 and not dataset[0]["token_types"].any()


def test_training_reads_each_row_once_an_epoch_in_a_new_order(tokenizer):
    data = rows(*(((word,), word) for word in WORDS[:6]))
    classes = {word: number for number, word in enumerate(WORDS)}
    train = build_classification_datasets(
        (data, None, None),
        (18, 0, 0),
        tokenizer=tokenizer,
        classes=WORDS,
        sequence_length=8,
        seed=5,
    ).train
    assert train is not None and len(train) == 18
    seen = [int(train[n]["classes"]) for n in range(18)]
    epochs = [seen[start : start + 6] for start in (0, 6, 12)]
    assert all(sorted(epoch) == [classes[word] for word in WORDS[:6]] for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert all(train[n]["weights"] == 1 for n in range(18))


def test_an_evaluation_counts_each_row_once(tokenizer):
    data = rows(*(((word,), word) for word in WORDS[:5]))
    datasets = build_classification_datasets(
        (data, data, None), (0, 8, 0), tokenizer=tokenizer, classes=WORDS, sequence_length=8
    )
    valid = datasets.valid
    assert datasets.train is None and datasets.test is None and valid is not None
    assert [int(valid[n]["classes"]) for n in range(5)] == [0, 1, 2, 3, 4]
    assert [int(valid[n]["weights"]) for n in range(8)] == [1] * 5 + [0] * 3
    with pytest.raises(IndexError):
        valid[8]


def test_a_split_is_a_division_of_all_rows():
    data = rows(*(((str(n),), "x") for n in range(100)))
    splits = split_rows(data, "80,10,10")
    assert [len(split) for split in splits] == [80, 10, 10]
    assert sorted(int(row.texts[0]) for split in splits for row in split) == [*range(100)]
    assert [row.texts for row in splits[0]] != [row.texts for row in data[:80]]
    assert splits == split_rows(data, "80,10,10")


def test_wrong_rows_are_refused(tokenizer):
    data = rows((("a",), "x"), (("a", "b"), "y"))
    with pytest.raises(DataError, match="f:2: the label 'y' is not one of the classes x"):
        ClassificationDataset(data, tokenizer, {"x": 0}, 8)
    with pytest.raises(DataError, match=r"sequence length 4 is too short .* at least 5"):
        ClassificationDataset(data, tokenizer, {"x": 0, "y": 1}, 4)
    many = {f"c{number}": number for number in range(25)}
    with pytest.raises(
        DataError, match=r"the label 'x' is not one of the classes c0, .*, c19; corr"
    ):
        ClassificationDataset(data, tokenizer, many, 8)
    with pytest.raises(EmptySplitError):
        build_classification_datasets(
            ([], None, None), tokenizer=tokenizer, classes=["x"], sequence_length=8
        )
    assert np.asarray(ClassificationDataset(data, tokenizer, {"x": 0, "y": 1}, 5)[1]["tokens"]).size


class Letters:
    """A tokenizer of letters from 10 on, with the named special tokens."""

    def __init__(self, bos_id=None, eod_id=None, pad_id=None, **named):
        self.bos_id, self.eod_id, self.pad_id, self.named = bos_id, eod_id, pad_id, named

    def token_id(self, name):
        return self.named.get(name)

    def encode(self, text):
        return [10 + ord(letter) - ord("a") for letter in text]


@pytest.mark.parametrize(
    ("tokenizer", "tokens", "types"),
    [
        (Letters(0, 2, 1, **{"<s>": 0, "</s>": 2, "<mask>": 4}),
         [0, 10, 11, 2, 2, 12, 2, 1, 1], [0] * 9),  # RoBERTa
        (Letters(5, 6, **{"<s>": 5, "</s>": 6}), [5, 10, 11, 6, 12, 6, 0, 0, 0], [0] * 9),
        (Letters(5, 6, 1, **{"<s>": 5, "<mask>": 4}), [5, 10, 11, 6, 12, 6, 1, 1, 1], [0] * 9),
        (Letters(6, 6, 1), [10, 11, 6, 12, 6, 1, 1, 1, 1], [0] * 9),
        (Letters(None, 6), [10, 11, 6, 12, 6, 0, 0, 0, 0], [0] * 9),
        (Letters(None, 6, **{"[CLS]": 2}), [10, 11, 6, 12, 6, 0, 0, 0, 0], [0] * 9),
        (Letters(None, 6, **{"[SEP]": 3}), [10, 11, 6, 12, 6, 0, 0, 0, 0], [0] * 9),
        (Letters(None, 6, 7, **{"[CLS]": 2, "[SEP]": 3}),
         [2, 10, 11, 3, 12, 3, 7, 7, 7], [0, 0, 0, 0, 1, 1, 0, 0, 0]),
    ],
)  # fmt: skip
def test_the_special_tokens_follow_from_the_tokenizer(tokenizer, tokens, types):
    dataset = ClassificationDataset(rows((("ab", "c"), "x")), tokenizer, {"x": 0}, 9)
    sample = dataset[0]
    last = len(tokens) - 1 - tokens[::-1].index(12) + 1
    assert (sample["tokens"].tolist(), sample["token_types"].tolist()) == (tokens, types)
    assert sample["last_tokens"] == last and sample["positions"].tolist() == list(range(9))
    assert sample["document_ids"].tolist() == [0] * (last + 1) + [-1] * (8 - last)
    whole = ClassificationDataset(rows((("ab", "c"), "x")), tokenizer, {"x": 0}, last + 1)
    assert whole[0]["tokens"].tolist() == tokens[: last + 1]  # it just fits
    special = last + 1 - 3
    short = ClassificationDataset(rows((("ab", "c"), "x")), tokenizer, {"x": 0}, special + 2)
    assert short[0]["tokens"].tolist() == [token for token in tokens[: last + 1] if token != 11]
    with pytest.raises(
        DataError, match=f"too short for {special} special .* at least {special + 2}"
    ):
        ClassificationDataset(rows((("ab", "c"), "x")), tokenizer, {"x": 0}, special + 1)


def test_a_tokenizer_without_an_end_of_texts_is_refused():
    with pytest.raises(
        DataError, match=r"neither \[CLS\] and \[SEP\] nor an end-of-document token"
    ):
        ClassificationDataset(rows((("a",), "x")), Letters(5), {"x": 0}, 9)


def test_an_order_is_that_of_the_seed_and_the_epoch(tokenizer):
    data = rows(*(((word,), word) for word in WORDS[:6]))
    classes = {word: number for number, word in enumerate(WORDS)}
    dataset = ClassificationDataset(data, tokenizer, classes, 8, 12, 5)
    for epoch in range(2):
        order = np.random.default_rng((5, epoch)).permutation(6).tolist()
        found = [int(dataset[6 * epoch + at]["classes"]) for at in range(6)]
        assert found == [classes[WORDS[at]] for at in order]
    assert len(ClassificationDataset(data, tokenizer, classes, 8)) == 6
    with pytest.raises(IndexError, match="sample -1 is out of range; there are 12 samples"):
        dataset[-1]
