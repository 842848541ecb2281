"""Tests of the benchmark: its counts, and the slowest phase."""

import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import pytest
from megatron_data import ByteTokenizer, DataError, HuggingFaceTokenizer
from megatron_data.cli.main import main
from megatron_data.preprocessing import (
    BenchmarkReport,
    PhaseMeasurement,
    benchmark,
    benchmarking,
)
from megatron_data.preprocessing.batches import AT_ONCE
from megatron_data.preprocessing.benchmarking import PHASES


def test_every_phase_is_measured_on_the_same_documents(
    corpus: Path, texts: list[str], tokenizer: HuggingFaceTokenizer
) -> None:
    started = perf_counter()
    found = benchmark([corpus], tokenizer, sequence_length=16, other_tokenizers=[ByteTokenizer()])
    measured = (*found.phases, *found.other_measurements)
    assert sum(one.seconds for one in measured) <= perf_counter() - started
    assert tuple(phase.name for phase in found.phases) == PHASES
    tokens = sum(map(len, tokenizer.encode_batch(texts)))
    read, parse, tokenize, write = found.phases
    assert [phase.documents for phase in found.phases] == [len(texts)] * 4
    assert (tokenize.tokens, write.tokens, read.tokens, parse.tokens) == (tokens, tokens, 0, 0)
    assert all(phase.seconds > 0 for phase in found.phases)
    # The size is that of the lines without line ends.
    assert all(0 <= corpus.stat().st_size - s.size <= len(texts) for s in found.phases)
    other, whole, samples = found.other_measurements
    assert other.name == "tokenize, ByteTokenizer"
    assert other.tokens == len("".join(texts).encode())
    assert whole.name == "preprocess, 1 process" and whole.tokens == tokens
    assert samples.name == "samples" and samples.tokens == samples.documents * 16


def test_reading_stops_after_the_given_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text((json.dumps({"text": "x" * 9990}) + "\n") * 400)
    found = benchmark([path], ByteTokenizer(), megabytes=1.5)
    assert 1.5e6 <= found.phases[0].size < 3.5e6  # at most one chunk of a megabyte more


def test_texts_are_tokenized_in_groups_as_in_preprocess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert benchmarking._BATCH_CHARACTERS == AT_ONCE
    monkeypatch.setattr(benchmarking, "_BATCH_CHARACTERS", 5)
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in ("ab", "cde", "fghijk", "l")))
    groups: list[list[str]] = []

    class Watched(ByteTokenizer):
        def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
            groups.append([*texts])
            return super().encode_batch(texts)

    benchmark([path], ByteTokenizer(), other_tokenizers=[Watched()])
    assert groups == [["ab", "cde"], ["fghijk"], ["l"]]


def test_the_slowest_phase_is_named() -> None:
    beside = (PhaseMeasurement("preprocess, 2 processes", 99.0, 1, 1),)
    for scale, share in ((1, 0.75), (1 / 64, 0.75), (0, 0.0)):
        times = zip(PHASES, (1.0, 2.0, 15.0, 2.0), strict=True)
        phases = [PhaseMeasurement(name, seconds * scale, 1, 1) for name, seconds in times]
        assert BenchmarkReport(tuple(phases), beside).bottleneck[1] == share
        assert scale == 0 or BenchmarkReport(tuple(phases), beside).bottleneck[0] == "tokenize"


def test_the_command_prints_a_table(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--input", str(corpus), "--tokenizer-type", "ByteTokenizer", "--seq-length", "32"]
    assert main(["bench", *words]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].split()[-3:] == ["MB/s", "documents/s", "tokens/s"]
    first = [line.split()[0].rstrip(",") for line in lines[1:7]]
    assert first == [*PHASES, "preprocess", "samples"]
    assert "300 documents, 0.1 MB" in out and "bound by " in lines[-1]


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="the first 12 bytes of the input give no token"):
        benchmark([path], ByteTokenizer())
    path.write_text('{"text": "good"}\n{"other": 1}\n')
    with pytest.raises(DataError, match=r"lines\.jsonl:2: no key 'text'"):
        benchmark([path], ByteTokenizer())
    for wrong in ({"megabytes": 0}, {"workers": 0}, {"sequence_length": 0}):
        with pytest.raises(DataError, match=r"each must be at least 1 .megabytes: more than 0"):
            benchmark([path], ByteTokenizer(), **wrong)  # type: ignore[arg-type]
    path.write_text('{"text": "good"}\n' * 3)
    # Three lines of 16 bytes are one chunk; 12 tokens are 11 samples of a token and its label.
    for size, read in ((16.5e-6, 1), (48.5e-6, 1), (49.5e-6, 2)):
        found = benchmark([path] * 3, ByteTokenizer(), megabytes=size, sequence_length=1)
        assert (found.phases[0].size, found.phases[0].documents) == (48 * read, 3 * read)
        assert found.phases[2].tokens == found.phases[3].tokens == 12 * read
