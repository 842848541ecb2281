"""The benchmark on a user's files: what it counts is there, and it names the slowest stage."""

import json
from pathlib import Path

import pytest
from megatron_data import ByteTokenizer, DataError, HuggingFaceTokenizer
from megatron_data.cli.main import main
from megatron_data.preprocessing import BenchmarkReport, StageMeasurement, benchmark
from megatron_data.preprocessing.benchmarking import STAGES


def test_every_stage_is_measured_on_the_same_documents(
    corpus: Path, texts: list[str], tokenizer: HuggingFaceTokenizer
) -> None:
    found = benchmark([corpus], tokenizer, sequence_length=16, other_tokenizers=[ByteTokenizer()])
    assert tuple(stage.name for stage in found.stages) == STAGES
    tokens = sum(map(len, tokenizer.encode_batch(texts)))
    read, parse, tokenize, write = found.stages
    assert [stage.documents for stage in found.stages] == [len(texts)] * 4
    assert (tokenize.tokens, write.tokens, read.tokens, parse.tokens) == (tokens, tokens, 0, 0)
    assert all(stage.seconds > 0 for stage in found.stages)
    # The size is that of the lines without their ends.
    assert all(0 <= corpus.stat().st_size - s.size <= len(texts) for s in found.stages)
    other, whole, samples = found.other_measurements
    assert other.name == "tokenize, ByteTokenizer"
    assert other.tokens == len("".join(texts).encode())
    assert whole.name == "preprocess, 1 process" and whole.tokens == tokens
    assert samples.name == "samples" and samples.tokens == samples.documents * 16


def test_it_stops_after_so_many_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text((json.dumps({"text": "x" * 9990}) + "\n") * 400)
    found = benchmark([path], ByteTokenizer(), megabytes=1.5)
    assert 1.5e6 <= found.stages[0].size < 3.5e6  # a chunk of a megabyte more at the most


def test_the_slowest_stage_is_named() -> None:
    times = zip(STAGES, (1.0, 2.0, 15.0, 2.0), strict=True)
    stages = tuple(StageMeasurement(name, seconds, 1, 1) for name, seconds in times)
    beside = (StageMeasurement("preprocess, 2 processes", 99.0, 1, 1),)
    assert BenchmarkReport(stages, beside).bottleneck == ("tokenize", 0.75)


def test_the_command_prints_a_table(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--input", str(corpus), "--tokenizer-type", "ByteTokenizer", "--seq-length", "32"]
    assert main(["bench", *words]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].split()[-3:] == ["MB/s", "documents/s", "tokens/s"]
    first = [line.split()[0].rstrip(",") for line in lines[1:7]]
    assert first == [*STAGES, "preprocess", "samples"]
    assert "300 documents, 0.1 MB" in out and "bound by " in lines[-1]


def test_what_cannot_be_measured_is_told(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="the first 12 bytes of the input give no token"):
        benchmark([path], ByteTokenizer())
    path.write_text('{"text": "good"}\n{"other": 1}\n')
    with pytest.raises(DataError, match=r"lines\.jsonl:2: no key 'text'"):
        benchmark([path], ByteTokenizer())
