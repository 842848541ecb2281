"""Blends by weights, epochs and tokens: the table equals what a run draws."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from megatron_data import DataError, build_gpt_datasets
from megatron_data.cli.main import main
from megatron_data.datasets import (
    Blend,
    blend_by_epochs,
    blend_by_tokens,
    read_data_args,
    summarize_blend,
    write_data_args,
)

WriteDataset = Callable[..., str]


@pytest.fixture
def sources(write_dataset: WriteDataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Writes `a` with 100 documents and 1,000 tokens, and `b` with 20 documents and 300 tokens."""
    monkeypatch.chdir(tmp_path)
    write_dataset([[n % 7 + 1] * 10 for n in range(100)], "a")
    write_dataset([[n % 5 + 9] * 15 for n in range(20)], "b")


@pytest.mark.usefixtures("sources")
def test_counts_equal_those_of_a_run() -> None:
    for blend in (
        Blend(("a", "b"), (0.7, 0.3)),
        Blend(("a", "b"), None),
        Blend(("a", "b", "a"), (0.1, 0.5, 0.4)),
        blend_by_epochs({"a": 1, "b": 2.5}),
    ):
        train, *_ = build_gpt_datasets(blend, "1,0,0", (173, 0, 0), 8)
        drawn = Counter(int(train[number]["dataset_ids"]) for number in range(173))
        mixed = summarize_blend(blend, 173, 8)
        assert [source.num_samples for source in mixed] == [drawn[0], drawn[1]]
        assert [source.prefix for source in mixed] == ["a", "b"]
        assert [source.num_tokens for source in mixed] == [1000, 300]


@pytest.mark.usefixtures("sources")
def test_blends_by_epochs_and_tokens_read_the_requested_amounts() -> None:
    blend = blend_by_epochs({"a": 2, "b": 5})
    assert blend == Blend(("a", "b"), (2000, 1500))
    a, b = summarize_blend(blend, 3500 // 10, 10)
    assert (a.drawn_tokens, b.drawn_tokens, a.epochs, b.epochs) == (2000, 1500, 2, 5)
    half = blend_by_epochs({"a": 1, "b": 1}, split="1,1,0")
    assert half.weights == (500, 150)
    assert [source.num_tokens for source in summarize_blend(half, 10, 10, "1,1,0")] == [500, 150]
    a, b = summarize_blend(blend_by_tokens({"a": 600, "b": 900}), 150, 10)
    assert (a.drawn_tokens, b.drawn_tokens, b.epochs) == (600, 900, 3)


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize("weights", [None, (0.1, 0.2), (1234567890123456, 1)])
def test_a_written_blend_can_be_read(weights: tuple[float, ...] | None) -> None:
    blend = Blend(("a", "b"), weights)
    write_data_args("blend.txt", blend)
    assert read_data_args("blend.txt") == blend


@pytest.mark.usefixtures("sources")
def test_invalid_blends_are_refused(write_dataset: WriteDataset) -> None:
    write_dataset([[]], "empty")
    with pytest.raises(DataError, match="the training split of empty has no token"):
        summarize_blend(Blend(("a", "empty"), None), 10, 8)
    with pytest.raises(DataError, match="0 epochs of a; give a positive number"):
        blend_by_epochs({"a": 0})
    with pytest.raises(DataError, match="a blend without sources"):
        blend_by_tokens({})
    for count in (0, -1, float("inf"), float("nan")):
        with pytest.raises(DataError, match=f"{count} tokens of a; give a positive number"):
            blend_by_tokens({"b": 1, "a": count})  # type: ignore[dict-item]
    with pytest.raises(DataError, match="1 samples of 0 tokens; give at least 1 of each"):
        summarize_blend(Blend(("a",), None), 1, 0)
    with pytest.raises(DataError, match="0 samples of 8 tokens"):
        summarize_blend(Blend(("a",), None), 0, 8)
    with pytest.raises(DataError, match="'0,1,0' has no training split"):
        summarize_blend(Blend(("a",), None), 1, 8, "0,1,0")
    with pytest.raises(
        DataError, match="'a b' contains white space, which separates prefixes in list"
    ):
        write_data_args("list", Blend(("a b",), None))


@pytest.mark.usefixtures("sources")
def test_the_command_prints_a_table_and_writes_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--epochs", "2", "5", "--seq-length", "10", "--output", "blend.txt"]
    assert main(["mix", "a", "b", *words]) == 0
    assert capsys.readouterr().out == (
        "source  documents  tokens   share  samples  drawn  epochs\n"
        "a             100   1,000  57.14%      200  2,000    2.00\n"
        "b              20     300  42.86%      150  1,500    5.00\n"
        "350 samples of 10 tokens: 3,500 tokens\n"
        "blend.txt: for --data-args-path\n"
    )
    assert Path("blend.txt").read_text() == "2000 a\n1500 b\n"
    again = ["--data-args-path", "blend.txt", "--samples", "350", "--seq-length", "10"]
    assert main(["mix", *again]) == 0
    assert "350 samples" in capsys.readouterr().out
    assert main(["mix", "a", "b", "--tokens", "6e2", "9e2", "--seq-length", "10"]) == 0
    assert "150 samples of 10 tokens: 1,500 tokens" in capsys.readouterr().out
    assert main(["mix", "0.5", "a", "0.5", "b", "--seq-length", "10"]) == 0
    assert "130 samples of 10 tokens: 1,300 tokens" in capsys.readouterr().out


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ([], 2, "give either PREFIX or --data-args-path FILE"),
        (["a", "--data-args-path", "x"], 2, "give either PREFIX or --data-args-path"),
        (["a", "b", "--epochs", "1"], 2, "--epochs has 1 number for 2 prefixes"),
        (["a", "--epochs", "1", "2"], 2, "--epochs has 2 numbers for 1 prefix; give one for each"),
        (["1", "a", "--epochs", "1"], 2, "give only one of weights, --epochs and --tokens"),
        (
            ["a", "--tokens", "1", "--epochs", "1"],
            2,
            "give only one of weights, --epochs and --tokens",
        ),
        (["a", "a", "b", "--tokens", "1", "2", "3"], 2, "a prefix is given twice"),
        (["nowhere"], 1, "nowhere"),
    ],
)
def test_an_invalid_command_line_is_reported(
    words: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mix", *words]) == status
    assert message in capsys.readouterr().err
