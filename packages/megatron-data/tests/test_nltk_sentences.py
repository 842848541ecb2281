"""Tests of nltk's sentences, with a model made by hand, and of errors for missing data."""

import pickle
import sys
from pathlib import Path
from time import process_time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_data import ByteTokenizer, DataError, preprocess
from megatron_data.cli import main
from megatron_data.preprocessing import NLTKSplitter, nltk_sentences
from megatron_data.preprocessing.manifest import read_manifest

nltk = pytest.importorskip("nltk", reason="an extra of this package")


TEXT = "Dr. Ahab left. He said: no!\n\nThen it ended. . ."
MODEL = {
    "abbrev_types.txt": "dr\n",
    "collocations.tab": "",
    "sent_starters.txt": "then\n",
    "ortho_context.tab": "he\t46\n",
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes a model with one abbreviation to a folder of nltk's data."""
    folder = tmp_path / "data" / "tokenizers" / "punkt_tab" / "seaspeak"
    folder.mkdir(parents=True)
    for name, content in MODEL.items():
        (folder / name).write_text(content)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "data")])
    return folder


def test_white_space_is_dropped_or_kept_and_the_model_is_used(model: Path) -> None:
    splitter = NLTKSplitter("seaspeak")
    assert splitter.split(TEXT) == [
        *("Dr. Ahab left.", "He said: no!", "Then it ended.", ".", "."),
    ]
    kept = NLTKSplitter("seaspeak", keep_newlines=True)
    assert kept.split(TEXT) == ["Dr. Ahab left. ", "He said: no!\n\n", "Then it ended. ", ". ", "."]
    twin = pickle.loads(pickle.dumps(kept))
    assert twin.record == kept.record == splitter.record | {"keep_newlines": True}
    assert twin.split(TEXT) == kept.split(TEXT)
    digests = {splitter.record["data"]}
    for name, content in (
        ("collocations.tab", "a\tb\n"),
        ("sent_starters.txt", "then\nnow\n"),
        ("ortho_context.tab", "he\t45\n"),
        ("abbrev_types.txt", "mr\n"),
    ):
        (model / name).write_text(content)
        digests.add(NLTKSplitter("seaspeak").record["data"])
    assert len(digests) == 5
    assert NLTKSplitter("seaspeak").split(TEXT)[0] == "Dr."


def test_a_text_is_cut_after_a_million_characters(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert nltk_sentences._AT_ONCE == 1_000_000
    monkeypatch.setattr(nltk_sentences, "_AT_ONCE", 6)
    assert NLTKSplitter("seaspeak").split("aaaa bbbb ccc") == ["aaaa b", "bbb cc", "c"]
    assert NLTKSplitter("seaspeak").split("") == []


@pytest.mark.parametrize(
    "found", [None, SimpleNamespace(), SimpleNamespace(path=5), SimpleNamespace(path="/nowhere")]
)
def test_languages_are_not_listed_if_the_data_are_in_no_folder(
    model: Path, found: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a zip file they have no path."""

    def find(name: str, *_: object) -> object:
        if found is None or not name.rstrip("/").endswith("punkt_tab"):
            raise LookupError(name)
        return found

    monkeypatch.setattr(nltk.data, "find", find)
    with pytest.raises(DataError, match=r"punkt_tab/english is in none of .*data; run python -m"):
        NLTKSplitter()


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("aB.?!'\")( \n1,\x1c\x85"), max_size=40))
def test_white_space_is_kept_where_megatrons_expression_keeps_it(text: str) -> None:
    """Megatron's expression may start anywhere in a word; ours finds the same in linear time."""
    theirs = r"\S*%(SentEndChars)s\s*(?=(?P<after_tok>%(NonWord)s|(?P<next_tok>\S+)))"
    punkt = nltk.tokenize.punkt
    ours, wanted = (
        punkt.PunktSentenceTokenizer(
            lang_vars=type("V", (punkt.PunktLanguageVars,), {"_period_context_fmt": context})()
        ).tokenize(text)
        for context in (nltk_sentences._WITH_SPACE, theirs)
    )
    assert ours == wanted


def test_a_long_word_takes_linear_time(model: Path) -> None:
    """Twice as much text takes about twice as long, where Megatron's expression takes 4 times."""
    splitter = NLTKSplitter("seaspeak", keep_newlines=True)

    def seconds(length: int) -> float:
        text, started = "a" * length, process_time()
        assert splitter.split(text) == [text]
        return process_time() - started

    assert min(seconds(400_000) for _ in range(3)) < 8 * max(seconds(100_000) for _ in range(3))


def test_the_manifest_records_nltk_and_workers_find_its_data(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "data"))  # for the worker processes
    (tmp_path / "a.txt").write_text(TEXT)
    (made,) = preprocess(
        [tmp_path / "a.txt"],
        tmp_path / "o",
        ByteTokenizer(),
        splitter=NLTKSplitter("seaspeak"),
        workers=2,
    )
    assert (made.prefix, made.counts.sequences) == (str(tmp_path / "o_text_sentence"), 5)
    manifest = read_manifest(made.prefix)
    assert manifest is not None
    assert manifest["sentences"] == NLTKSplitter("seaspeak").record
    assert manifest["sentences"]["version"] == nltk.__version__


def test_missing_data_is_reported_with_the_command_to_install_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        DataError, match=r"language 'english' \(available: seaspeak\); give another --l"
    ):
        NLTKSplitter()
    with pytest.raises(DataError, match=r"Invalid .*; python -m nltk\.downloader punkt_tab"):
        NLTKSplitter("../../etc")
    (model / "abbrev_types.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(
        DataError, match=r"nltk cannot read its data .*/seaspeak: .*downloader punkt"
    ):
        NLTKSplitter("seaspeak")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "none")])
    with pytest.raises(
        DataError,
        match=r"punkt_tab/english is in none of .*none; run python -m nltk\.downloader punkt_tab",
    ):
        NLTKSplitter()
    monkeypatch.delattr("nltk.tokenize.punkt.PunktTokenizer")
    with pytest.raises(DataError, match=r"as pickles, .*; pip install -U 'megatron-data\[nltk\]'"):
        NLTKSplitter()
    monkeypatch.setitem(sys.modules, "nltk", None)
    with pytest.raises(DataError, match=r"needs nltk; pip install 'megatron-data\[nltk\]'"):
        NLTKSplitter()


def test_the_command_shows_the_default_and_refuses_conflicting_options(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "preprocess --input a --output-prefix b --tokenizer-type ByteTokenizer"
    command = words.split()
    assert main([*command, "--sentence-splitter", "nltk"]) == 2
    assert "--sentence-splitter needs --split-sentences" in capsys.readouterr().err
    assert main([*command, "--split-sentences", "--sentence-splitter", "spacy"]) == 2
    assert "unknown --sentence-splitter 'spacy' (known: punkt, nltk)" in capsys.readouterr().err
    assert main([*command, "--split-sentences", "--sentence-splitter", "nltk"]) == 1
    assert "has no language 'english'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["preprocess", "--help"])
    assert "[default punkt]" in " ".join(capsys.readouterr().out.split())
