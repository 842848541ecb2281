"""What the commands print and pass on: counts, units, shares, defaults and messages."""

import errno
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron_data import DataError, EmptySplitError, train_bpe
from megatron_data._command import CommandError, Parser
from megatron_data._version import __version__
from megatron_data.cli import main
from megatron_data.cli.bounds import Bounded
from megatron_data.cli.main import build_parser
from megatron_data.cli.tables import format_table
from megatron_data.cli.trace import _place
from megatron_data.cli.work import print_resumed, print_skipped
from megatron_data.errors import add_path_to_errors
from megatron_data.plural import plural
from megatron_data.preprocessing import BenchmarkReport, PhaseMeasurement
from megatron_data.preprocessing.engine import PreprocessedDataset
from megatron_data.preprocessing.manifest import Counts, Skipped
from megatron_data.tokenizers import TemplateLimits

Capture = pytest.CaptureFixture[str]


def test_a_table_aligns_numbers_to_the_right_and_names_to_the_left() -> None:
    rows = [("a", "1", "22"), ("long name", "333", "")]
    assert format_table(("source", "n", "share"), rows) == (
        "source       n  share\na            1     22\nlong name  333"
    )
    assert plural(1, "document") == "1 document" and plural(2, "document") == "2 documents"


def test_options_take_numbers_from_their_bound_on() -> None:
    parser = Parser(prog="p")
    parser.add_argument("--one", type=int, action=Bounded)
    parser.add_argument("--zero", type=int, action=Bounded, minimum=0)
    parser.add_argument("--above", type=float, action=Bounded, exclusive_minimum=0, nargs="+")
    parsed = parser.parse_args(["--one", "1", "--zero", "0", "--above", "0.5", "1e-9"])
    assert (parsed.one, parsed.zero, parsed.above) == (1, 0, [0.5, 1e-9])
    for words, message in (
        (["--one", "0"], "--one 0; give at least 1"),
        (["--zero", "-1"], "--zero -1; give at least 0"),
        (["--above", "1", "0"], "--above 0.0; give more than 0"),
        (["--above", "-1"], "--above -1.0; give more than 0"),
    ):
        with pytest.raises(CommandError, match=message):
            parser.parse_args(words)


def test_resumed_chunks_and_skipped_documents_are_counted(capsys: Capture) -> None:
    def made(chunks: int, resumed: int, skipped: dict[str, int]) -> Any:
        return SimpleNamespace(
            chunks=chunks,
            resumed_chunks=resumed,
            skipped=Skipped(sum(skipped.values()), skipped),
            first_skipped="a:1: why",
        )

    for dataset in (made(1, 0, {}), made(1, 1, {}), made(2000, 1999, {})):
        print_resumed(dataset)
        print_skipped(dataset, SimpleNamespace(on_error="skip"))  # type: ignore[arg-type]
    assert capsys.readouterr().out == (
        "1 of 1 chunk was finished by an earlier run\n"
        "1,999 of 2,000 chunks were finished by an earlier run\n"
    )
    skipped = made(1, 0, {"json": 1, "key": 1000})
    for how, details in (("skip", "the first: a:1: why"), ("quarantine", "see o.quarantine.jsonl")):
        print_skipped(skipped, SimpleNamespace(on_error=how, output_prefix="o"))  # type: ignore[arg-type]
        assert capsys.readouterr().out == (
            f"1,001 skipped (1 not a JSON object, 1,000 without the key); {details}\n"
        )


def test_a_place_is_a_line_with_its_bytes_or_a_row() -> None:
    assert _place(None, None, None) == []
    assert _place(7, None, 9) == [", row 7"]
    assert _place(1234, 0, 9) == [", line 1,234", ", bytes 0 to 8"]
    assert _place(None, 5, None) == [] and _place(None, 5, 1) == [", bytes 5 to 5"]


def test_inspect_shows_three_documents_of_60_tokens(
    write_dataset: Callable[..., str], capsys: Capture
) -> None:
    prefix = write_dataset([[5], list(range(61)), [], [9, 9], [7]])
    assert main(["inspect", prefix]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{prefix}: 5 documents, 5 sequences, 65 tokens, uint16"
    assert "document lengths in tokens" in lines
    at = lines.index("vocabulary: 61 tokens occur; the most common:")
    assert lines[at + 1 : at + 4] == [
        "         9   4.62%",  # 3 of 65
        "         5   3.08%",
        "         7   3.08%",
    ]
    assert lines[at + 9 :] == [
        "",
        "document 0, 1 token",
        "5",
        "",
        "document 1, 61 tokens",
        " ".join(map(str, range(60))),
        "",
        "document 2, 0 tokens",
        "",
    ]
    assert main(["inspect", prefix, "--documents", "9", "--tokens", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith("document 3, 2 tokens\n9\n\ndocument 4, 1 token\n7\n")
    assert main(["inspect", prefix, "--documents", "0"]) == 0
    assert "document 0" not in capsys.readouterr().out


def test_bench_prints_rates_and_the_bottleneck(monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    phases = (
        PhaseMeasurement("read", 0.5, 4 * 10**12, 1000),
        PhaseMeasurement("parse", 0.5, 4 * 10**12, 1000),
        PhaseMeasurement("tokenize", 2.0, 4 * 10**12, 1000, 8000),
        PhaseMeasurement("write", 1.0, 4 * 10**12, 1000, 8000),
    )
    beside = (PhaseMeasurement("samples", 0.5, 0, 2000, 9000),)
    seen: dict[str, Any] = {}

    def measure(*words: Any, **options: Any) -> BenchmarkReport:
        seen.update(options)
        return BenchmarkReport(phases, beside)

    monkeypatch.setattr("megatron_data.preprocessing.benchmarking.benchmark", measure)
    words = ["bench", "--input", "a", "--tokenizer-type", "ByteTokenizer"]
    assert main([*words, "--megabytes", "0.25"]) == 0
    assert seen["megabytes"] == 0.25
    capsys.readouterr()
    assert main(words) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1:6] == [
        ["read", "0.500", "12.5%", "8,000,000.00", "2,000"],
        ["parse", "0.500", "12.5%", "8,000,000.00", "2,000"],
        ["tokenize", "2.000", "50.0%", "2,000,000.00", "500", "4,000"],
        ["write", "1.000", "25.0%", "4,000,000.00", "1,000", "8,000"],
        ["samples", "0.500", "4,000", "18,000"],
    ]
    assert " ".join(rows[7]).startswith("1,000 documents, 4000000.0 MB, on a machine of ")
    assert " ".join(rows[8]).startswith("bound by tokenize, 50% of the phases: use several")
    assert seen == {
        "json_key": "text",
        "megabytes": 16,
        "workers": 1,
        "other_tokenizers": (),
        "sequence_length": 1024,
        "folder": None,
        "max_document_bytes": 33_554_432,
    }


@pytest.mark.parametrize(
    ("empty", "seconds", "size", "shown"),
    [
        (0, 2.0, 3 * 10**12, "2 documents, 1,000 tokens in 2.0 s (1500000.00 MB/s, 500 tokens/s)"),
        (1, 0.5, 3_000_000,
         "2 documents (1 empty), 1,000 tokens in 0.5 s (6.00 MB/s, 2,000 tokens/s)"),
        (0, 0.0, 0, "2 documents, 1,000 tokens in 0.0 s (0.00 MB/s, 1,000,000,000,000 tokens/s)"),
    ],
)  # fmt: skip
def test_preprocess_prints_counts_and_speed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    empty: int,
    seconds: float,
    size: int,
    shown: str,
) -> None:
    made = PreprocessedDataset(
        "o_text_document", Counts(2, empty, 2, 1000), size, seconds, Skipped(0, {}), None, 1, 0
    )
    seen: dict[str, Any] = {}

    def run(*words: Any, **options: Any) -> list[PreprocessedDataset]:
        seen.update(options)
        return [made]

    monkeypatch.setattr("megatron_data.preprocessing.pipeline.preprocess", run)
    words = ["--input", "a", "--tokenizer-type", "ByteTokenizer", "--output-prefix", "o"]
    assert main(["preprocess", *words]) == 0
    assert capsys.readouterr() == (f"o_text_document: {shown}\n", "")
    assert seen == {
        "json_keys": ["text"],
        "parallel": False,
        "append_eod": False,
        "splitter": None,
        "workers": 1,
        "on_error": "fail",
        "max_document_bytes": 33_554_432,
        "progress": True,
        "overwrite": False,
    }


PARTLY = SimpleNamespace(
    chunks=1, resumed_chunks=1, skipped=Skipped(1, {"json": 1}), first_skipped="a:1: why"
)
BEFORE = "1 of 1 chunk was finished by an earlier run\n"
BEHIND = "1 skipped (1 not a JSON object); the first: a:1: why\n"


def test_images_are_reported_in_megabytes(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    report = SimpleNamespace(
        prefix="o_image_text", pairs=1, tokens=2000, image_bytes=2_560_000_000_000, truncated=1,
        dataset=PARTLY,
    )  # fmt: skip
    seen: dict[str, Any] = {}

    def run(*words: Any, **options: Any) -> Any:
        seen.update(options)
        return report

    monkeypatch.setattr("megatron_data.preprocessing.image_pairs.tokenize_image_pairs", run)
    words = ["--input", "a", "--tokenizer-type", "ByteTokenizer", "--output-prefix", "o"]
    assert main(["tokenize-images", *words]) == 0
    assert capsys.readouterr().out == (
        f"{BEFORE}o_image_text: 1 pair, 2,000 tokens, 2560000.0 MB of images; 1 text truncated\n"
        f"{BEHIND}"
    )
    assert seen["json_keys"] == ("text", "image") and seen["progress"] is True
    assert (seen["max_image_bytes"], seen["allow_http"], seen["overwrite"]) == (
        33_554_432, False, False,
    )  # fmt: skip


def test_a_blend_of_few_tokens_gives_one_sample(
    write_dataset: Callable[..., str], capsys: Capture
) -> None:
    prefix = write_dataset([[1, 2, 3]])
    assert main(["mix", prefix, "--seq-length", "5000"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 sample of 5,000 tokens: 5,000 tokens"
    assert main(["mix", prefix]) == 0
    assert "1 sample of 1,024 tokens: 1,024 tokens" in capsys.readouterr().out
    assert main(["mix", prefix, "--seq-length", "1"]) == 0
    assert "3 samples of 1 token: 3 tokens" in capsys.readouterr().out
    for amount, samples in (("--epochs 0.5", 2), ("--tokens 1", 1), ("--tokens 0.9", 1)):
        assert main(["mix", prefix, "--seq-length", "1", *amount.split()]) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith(f"{plural(samples, 'sample')} of 1 token")


def test_a_long_message_keeps_its_beginning_and_its_end() -> None:
    assert str(DataError("a" * 1000 + "b" * 500)) == "a" * 1000 + "b" * 500
    cut = str(DataError("a" * 1000 + "-" * 9 + "b" * 500))
    assert cut == "a" * 1000 + " … " + "b" * 500
    assert str(DataError("x" * 1501)) == "x" * 1000 + " … " + "x" * 500
    assert str(DataError("two\n  lines")) == "two lines"
    assert str(DataError("two  spaces")) == "two  spaces"
    assert str(EmptySplitError("a split")) == "a split; widen the split, or request 0 samples"


def test_only_an_error_without_a_file_name_gets_the_path() -> None:
    for error, filename in (
        (OSError(errno.ENOSPC, "No space left on device"), "a.bin"),
        (OSError(errno.ENOSPC, "No space left on device", "b"), "b"),
        (OSError("closed"), None),
    ):
        with (
            pytest.raises(OSError, match=r"space|closed") as raised,
            add_path_to_errors(Path("a.bin")),
        ):
            raise error
        assert raised.value.filename == filename
        assert raised.value.errno == error.errno


def test_conversations_are_reported_with_what_the_loss_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    pytest.importorskip("jinja2")
    train_bpe(["a b"], 260).save(tmp_path / "t")
    (tmp_path / "t" / "chat_template.jinja").write_text("{{ messages }}")
    report = SimpleNamespace(
        rows=1, conversations=2000, tokens=3000, loss_tokens=1500, truncated=1, dropped=1200,
        without_loss=3, dataset=PARTLY,
    )  # fmt: skip
    seen: dict[str, Any] = {}

    def run(*words: Any, **options: Any) -> Any:
        seen.update(options, limits=words[3].limits)
        return report

    monkeypatch.setattr("megatron_data.preprocessing.conversations.tokenize_conversations", run)
    words = ["--input", "a", "--tokenizer-model", str(tmp_path / "t"), "--output-prefix", "o"]
    assert main(["tokenize-conversations", *words]) == 0
    assert capsys.readouterr().out == (
        f"{BEFORE}o_conversation: 2,000 conversations of 1 row, 3,000 tokens, 1,500 of them "
        f"counted by the loss; 1 truncated, 1,200 dropped, 3 without an answer\n{BEHIND}"
    )
    assert seen == {
        "loss": "assistant",
        "max_tokens": None,
        "over_length": "truncate",
        "workers": 1,
        "on_error": "fail",
        "max_document_bytes": 33_554_432,
        "progress": True,
        "overwrite": False,
        "limits": TemplateLimits(20_000_000, 1 << 26),
    }


def test_numbers_of_special_tokens_may_be_0(capsys: Capture) -> None:
    for flag in ("--vocab-extra-ids", "--tiktoken-num-special-tokens"):
        words = ["preprocess", "--input", "a", "--output-prefix", "b", flag]
        assert build_parser().parse_args([*words, "0"]).input == ["a"]
        assert main([*words, "-1"]) == 2
        assert f"{flag} -1; give at least 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "kind", "expected", "shown"),
    [
        ([], "bpe", {"progress": False}, "300 tokens, sha256:1"),
        (["--special-tokens", "<a>"], "unigram", {"special_tokens": ["<a>"]}, "300 tokens"),
        (["--cased", "--min-frequency", "1"], "wordpiece",
         {"lower_case": False, "min_frequency": 1}, "300 tokens"),
        (["--vocab-size", "301"], "bpe", {}, "300 tokens (the text gives at most 300), sha256:1"),
    ],
)  # fmt: skip
def test_options_of_training_are_passed_on(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path,
    options: list[str], kind: str, expected: dict[str, Any], shown: str,
) -> None:  # fmt: skip
    seen: dict[str, Any] = {}
    saved: list[Path] = []
    made = SimpleNamespace(vocab_size=300, fingerprint="sha256:1", save=saved.append)

    def train(texts: Any, size: int, **given: Any) -> Any:
        seen.update(given)
        return made

    monkeypatch.setattr(f"megatron_data.tokenizers.training.train_{kind}", train)
    words = ["train-tokenizer", "--input", "a", "--output", str(tmp_path / "o"), "--kind", kind]
    assert main([*words, "--vocab-size", "300", *options]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'o'}: {shown}")
    assert seen == {"progress": False, **expected} and saved == [tmp_path / "o"]


def test_options_of_training_belong_to_a_kind(capsys: Capture) -> None:
    words = ["train-tokenizer", "--input", "a", "--output", "o", "--vocab-size", "300", "--kind"]
    for kind, option in (("bpe", "cased"), ("unigram", "cased"), ("unigram", "min-frequency")):
        value = ["2"] if option == "min-frequency" else []
        assert main([*words, kind, f"--{option}", *value]) == 2
        assert f"--{option} does not go with --kind {kind}" in capsys.readouterr().err


def test_a_histogram_has_blocks_only_where_the_output_has_them(
    write_dataset: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_dataset([[1, 2, 3]])
    for encoding, bar in (("ascii", "#"), ("UTF-8", "█"), (None, "#")):
        out = io.TextIOWrapper(io.BytesIO(), encoding or "utf-8")
        if encoding is None:
            out = io.StringIO()
        monkeypatch.setattr("sys.stdout", out)
        assert main(["inspect", prefix]) == 0
        out.seek(0)
        assert f"2 to 3 {bar * 50} 1\n" in out.read()


def test_an_empty_document_has_no_token_and_the_version_is_printed(
    tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ""}\n{"text": "a"}\n')
    words = ["--input", str(path), "--output-prefix", str(tmp_path / "o")]
    assert main(["preprocess", *words, "--tokenizer-type", "ByteTokenizer"]) == 0
    capsys.readouterr()
    prefix = str(tmp_path / "o_text_document")
    for document, what in ((0, "no token"), (1, "tokens 0 to 0")):
        assert main(["trace", prefix, "--document", str(document)]) == 0
        assert capsys.readouterr().out.startswith(f"document {document} ({what}), from\n{path}, ")
    for compared in ("digests match the manifest", "no manifest: structure only"):
        assert main(["verify", prefix]) == 0
        shown = f"{prefix}: in order, 2 documents, 1 token ({compared})\n"
        assert capsys.readouterr().out == shown
        Path(f"{prefix}.meta.json").unlink(missing_ok=True)
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"megatron-data {__version__}\n")
