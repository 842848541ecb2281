"""Options that commands need, their bounds, and what `inspect` prints of a dataset."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron_data import IndexedDatasetBuilder
from megatron_data._command import CommandError
from megatron_data.cli import main
from megatron_data.cli.main import build_parser
from megatron_data.preprocessing import BenchmarkReport, PhaseMeasurement

Capture = pytest.CaptureFixture[str]

NEEDS = {
    "bench": "--input",
    "inspect": "PREFIX",
    "merge": "PREFIX, --output-prefix",
    "preprocess": "--input, --output-prefix",
    "split": "PREFIX, --output-prefixes",
    "tokenize-conversations": "--input, --output-prefix",
    "tokenize-images": "--input, --output-prefix",
    "trace": "PREFIX",
    "train-tokenizer": "--input, --vocab-size, --output",
    "verify": "PREFIX",
}


@pytest.mark.parametrize("command", NEEDS)
def test_a_command_names_all_that_it_needs(command: str, capsys: Capture) -> None:
    assert main([command]) == 2
    assert capsys.readouterr().err == (
        f"megatron-data: error: the following arguments are required: {NEEDS[command]}; "
        f"see megatron-data {command} --help\n"
    )


IO = "--input a --output-prefix b"


@pytest.mark.parametrize(
    ("words", "option", "outside", "allowed"),
    [
        ("bench --input a", "--megabytes", "0", "0.001"),
        ("bench --input a", "--workers", "0", "1"),
        ("bench --input a", "--seq-length", "0", "1"),
        ("inspect p", "--documents", "-1", "0"),
        ("inspect p", "--tokens", "-1", "0"),
        ("mix p", "--epochs", "0", "0.001"),
        ("mix p", "--tokens", "0", "0.001"),
        ("mix p", "--samples", "0", "1"),
        ("mix p", "--seq-length", "0", "1"),
        (f"preprocess {IO}", "--workers", "0", "1"),
        (f"preprocess {IO}", "--max-document-bytes", "0", "1"),
        (f"preprocess {IO}", "--vocab-size", "0", "1"),
        ("split p --output-prefixes a", "--shares", "0", "0.001"),
        ("split p --output-prefixes a", "--documents", "0", "1"),
        (f"tokenize-conversations {IO}", "--max-tokens", "1", "2"),
        (f"tokenize-conversations {IO}", "--max-template-steps", "0", "1"),
        (f"tokenize-conversations {IO}", "--max-template-characters", "0", "1"),
        (f"tokenize-images {IO}", "--max-image-bytes", "0", "1"),
        (f"tokenize-images {IO}", "--pad-length", "0", "1"),
        ("trace p", "--document", "-1", "0"),
        ("train-tokenizer --input a --vocab-size 9 --output o", "--min-frequency", "0", "1"),
        ("train-tokenizer --input a --output o", "--vocab-size", "0", "1"),
    ],
)
def test_a_number_is_allowed_from_its_bound_on(
    words: str, option: str, outside: str, allowed: str
) -> None:
    parser = build_parser()
    parsed = parser.parse_args([*words.split(), option, allowed])
    stored = getattr(parsed, option.removeprefix("--").replace("-", "_"))
    assert stored in (float(allowed), [float(allowed)])
    with pytest.raises(CommandError, match=rf"^{option} {outside}[.0]*; give (at least|more than)"):
        parser.parse_args([*words.split(), option, outside])


@pytest.mark.parametrize("options", ["", "--shares 1 --documents 1"])
def test_a_split_is_by_shares_or_by_documents(options: str, capsys: Capture) -> None:
    assert main(["split", "p", "--output-prefixes", "a", *options.split()]) == 2
    assert "give either --shares or --documents; see" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["trace p", "trace p 1 --document 1"])
def test_a_place_is_that_of_a_token_or_of_a_document(words: str, capsys: Capture) -> None:
    assert main(words.split()) == 2
    assert "give either TOKEN or --document N; see" in capsys.readouterr().err


def test_bench_measures_gigatoken_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    phases = tuple(
        PhaseMeasurement(name, 1.0, 1, 1) for name in ("read", "parse", "tokenize", "write")
    )
    seen: list[Any] = []

    def measure(*words: Any, other_tokenizers: Any, **options: Any) -> BenchmarkReport:
        seen.append(other_tokenizers)
        return BenchmarkReport(phases, ())

    monkeypatch.setattr("megatron_data.preprocessing.benchmarking.benchmark", measure)
    monkeypatch.setattr("megatron_data.tokenizers.fast.fast_tokenizer", lambda plain: "fast")
    words = ["bench", "--input", "a", "--tokenizer-type", "ByteTokenizer"]
    assert main(words) == main([*words, "--fast"]) == 0
    assert seen == [(), ("fast",)]


def test_inspect_shows_the_share_of_the_recorded_vocabulary(
    tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": ""}\n')
    words = ["--input", str(path), "--output-prefix", str(tmp_path / "o")]
    assert main(["preprocess", *words, "--tokenizer-type", "ByteTokenizer"]) == 0
    capsys.readouterr()
    prefix = str(tmp_path / "o_text_document")
    assert main(["inspect", prefix]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{prefix}: 2 documents (1 empty), 1 sequence, 1 token, uint16"
    at = lines.index("vocabulary: 1 of 257 (0.4%) tokens occur; the most common:")
    assert lines[at + 1] == "        97  100.00%"


def test_inspect_counts_images_beside_the_text(tmp_path: Path, capsys: Capture) -> None:
    with IndexedDatasetBuilder(tmp_path / "m", "int32", multimodal=True) as builder:
        builder.add_document([5, 6, 7, 8, 9], [2, 3], [0, 1])
        builder.add_document([5], [1], [0])
        builder.finalize()
    assert main(["inspect", str(tmp_path / "m")]) == 0
    shown = capsys.readouterr().out
    first = f"{tmp_path}/m: 2 documents, 3 sequences, 3 tokens, 1 image (12 bytes), int32\n"
    assert shown.startswith(first)
    assert shown.endswith("document 0, 2 tokens, images 1\n5 6\n\ndocument 1, 1 token\n5\n")


def test_inspect_of_a_dataset_without_tokens_shows_no_share(
    write_dataset: Callable[..., str], capsys: Capture
) -> None:
    assert main(["inspect", write_dataset([[]])]) == 0
    assert "vocabulary: 0 tokens occur; the most common:\n\ndocument 0, 0 tokens\n" in (
        capsys.readouterr().out
    )
