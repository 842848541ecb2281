"""`--sentence-splitter nltk` splits texts as Megatron's `preprocess_data.py --split-sentences`.

`megatron_sentences.json` contains texts and the results of `Encoder.split` of Megatron-LM's
`tools/preprocess_data.py` (commit d98e8a64) with nltk 3.10.4 and the `punkt_tab` of
llama-index-core 0.14.25: "kept" with `--keep-newlines`, "dropped" without.
"""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from megatron_data import IndexedDataset
from megatron_data.cli import main
from megatron_data.preprocessing import NLTKSplitter, PunktSplitter

nltk = pytest.importorskip("nltk")

WANTED = json.loads(Path(__file__).with_name("megatron_sentences.json").read_text())


@pytest.fixture(scope="module")
def punkt_tab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of nltk's data, found without importing the package that contains them.

    nltk refuses files with several hard links, which installers create from their cache.
    """
    spec = find_spec("llama_index")
    for place in (spec and spec.submodule_search_locations) or ():
        folder = Path(place) / "core" / "_static" / "nltk_cache"
        if folder.is_dir():
            return shutil.copytree(folder, tmp_path_factory.mktemp("nltk") / "data")
    pytest.skip("no punkt_tab: pip install --no-deps llama-index-core==0.14.25")


@pytest.fixture(autouse=True)
def data(punkt_tab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes nltk use only the copy."""
    monkeypatch.setattr(nltk.data, "path", [str(punkt_tab)])


@pytest.mark.parametrize("language", WANTED)
@pytest.mark.parametrize("which", ["kept", "dropped"])
def test_the_sentences_are_megatrons(language: str, which: str) -> None:
    splitter = NLTKSplitter(language, keep_newlines=which == "kept")
    for row in WANTED[language]:
        assert splitter.split(row["text"]) == row[which]


@pytest.mark.parametrize(("keep", "blank"), [(False, ""), (True, " ")])
def test_a_text_of_over_a_million_characters_is_split_as_megatrons(keep: bool, blank: str) -> None:
    space = "\n" * 999_985
    found = NLTKSplitter(keep_newlines=keep).split(f"Begin.{space}Cut here in a longword. The end.")
    begin = f"Begin.{space}" if keep else "Begin."
    assert found == [begin, "Cut here", f"in a longword.{blank}", "The end."]


def test_the_command_accepts_both_splitters_and_records_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = [row["text"] for row in WANTED["german"]]
    Path("a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = "preprocess --input a.jsonl --tokenizer-type ByteTokenizer --split-sentences"
    command += " --lang german --output-prefix"
    for name, options in (("nltk", "--sentence-splitter nltk --keep-newlines"), ("punkt", "")):
        assert main([*command.split(), name, *options.split()]) == 0
        manifest = json.loads(Path(f"{name}_text_sentence.meta.json").read_text())
        assert manifest["sentences"]["splitter"] == name
    with IndexedDataset("nltk_text_sentence") as made:
        sentences = [bytes(made.get(number).tolist()).decode() for number in range(len(made))]
    assert sentences == [sentence for row in WANTED["german"] for sentence in row["kept"]]


def test_punkt_has_the_same_rules() -> None:
    """Checks the default splitter, which differs only at consecutive dots, as documented."""
    pytest.importorskip("punkt")
    ours = PunktSplitter()
    for row in WANTED["english"]:
        if ". . ." not in row["text"]:
            assert ours.split(row["text"]) == row["dropped"]
