from pathlib import Path

import numpy as np
import pytest
from megatron_data.cli import main
from megatron_data.indexed.inspection import draw_histogram, draw_svg

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def tokenizer_folder(corpus: Path, tmp_path: Path, capsys: Capture) -> Path:
    folder = tmp_path / "tokenizer"
    command = ["train-tokenizer", "--input", str(corpus), "--vocab-size", "300"]
    assert main([*command, "--output", str(folder)]) == 0
    capsys.readouterr()
    return folder


def test_text_is_preprocessed_and_inspected(
    corpus: Path, tokenizer_folder: Path, tmp_path: Path, capsys: Capture, texts: list[str]
) -> None:
    prefix = str(tmp_path / "d")
    command = ["preprocess", "--input", str(corpus), "--output-prefix", prefix, "--append-eod"]
    assert main([*command, "--tokenizer-model", str(tokenizer_folder)]) == 0
    assert "300 documents" in capsys.readouterr().out
    prefix += "_text_document"
    assert main(["verify", prefix]) == 0
    assert "digests match" in capsys.readouterr().out
    command = ["inspect", prefix, "--tokenizer-model", str(tokenizer_folder), "--documents", "1"]
    assert main([*command, "--tokens", "100000"]) == 0
    shown = capsys.readouterr().out
    assert texts[0] in shown
    assert texts[1] not in shown
    assert "document lengths" in shown
    assert "of 300 (" in shown
    assert main(["inspect", prefix]) == 0


def test_inspect_refuses_the_wrong_tokenizer(
    corpus: Path, tokenizer_folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    prefix = str(tmp_path / "d")
    command = ["preprocess", "--input", str(corpus), "--output-prefix", prefix]
    assert main([*command, "--tokenizer-type", "ByteTokenizer"]) == 0
    command = ["inspect", f"{prefix}_text_document"]
    assert main([*command, "--tokenizer-model", str(tokenizer_folder)]) == 1
    assert "was made with tokenizer bytes:257" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        (["preproces"], 2, "did you mean preprocess?"),
        (["verify", "--deeep", "x"], 2, "unknown argument --deeep"),
        (["preprocess", "--input", "a", "--output-prefix", "b", "--worker", "2"], 2, "--workers?"),
        (["preprocess", "--input", "a", "--output-prefix", "b"], 2, "--tokenizer-model PATH"),
        (["preprocess", "--inpt", "a", "--output-prefix", "b"], 2, "--input"),
        (
            [
                "preprocess",
                "--input",
                "a",
                "--output-prefix",
                "b",
                "--tokenizer-type",
                "NullTokeniser",
            ],
            2,
            "did you mean NullTokenizer?",
        ),
        ([], 2, "COMMAND"),
        (["verify", "nowhere"], 1, "no dataset at nowhere"),
        (["inspect", "nowhere"], 1, "no dataset at nowhere"),
        (["inspect", __file__], 1, "if it is text, tokenize it with megatron-data preprocess"),
    ],
)
def test_errors_are_one_line(
    command: list[str], status: int, message: str, capsys: Capture
) -> None:
    try:
        found: object = main(command)
    except SystemExit as exit_:
        found = exit_.code
    printed = capsys.readouterr()
    assert found == status
    assert message in printed.err
    assert printed.err.startswith("megatron-data")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_input_errors_name_file_and_line(
    tokenizer_folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\nnot json\n')
    for command in (
        ["preprocess", "--tokenizer-model", str(tokenizer_folder), "--output-prefix", "x"],
        ["train-tokenizer", "--vocab-size", "300", "--output", "x"],
    ):
        assert main([*command, "--input", str(path)]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"megatron-data: error: {path}:2: not JSON")
        assert error.count("\n") == 1


def test_a_full_disk_or_a_forbidden_folder_is_one_line(
    corpus: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "file").write_text("")
    command = ["preprocess", "--input", str(corpus), "--tokenizer-type", "ByteTokenizer"]
    assert main([*command, "--output-prefix", str(tmp_path / "file" / "x")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("megatron-data: error: ")
    assert error.count("\n") == 1


def test_interruption_has_its_own_status(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    from megatron_data.preprocessing import verification

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verification, "verify", interrupt)
    assert main(["verify", "x"]) == 130
    assert capsys.readouterr().err == "megatron-data: interrupted\n"


def test_the_histogram_counts_every_value() -> None:
    picture = draw_histogram(np.array([0, 1, 2, 3, 4, 7, 8, 8, 8]), width=6, blocks=False)
    rows = [line.split() for line in picture.splitlines()]
    assert [row[-1] for row in rows] == ["1", "1", "2", "2", "3"]
    assert [" ".join(row[:-2]) for row in rows] == ["0", "1", "2 to 3", "4 to 7", "8 to 15"]
    assert rows[-1][-2] == "######"
    assert "█" in draw_histogram(np.array([5]))


def test_bars_are_as_long_as_their_counts_and_do_not_touch() -> None:
    from xml.etree import ElementTree as ET

    root = ET.fromstring(draw_svg(np.array([0, 1, 2, 3, 4, 7, 8, 8, 8]), "lengths"))
    bars = [one.attrib for one in root.iter("{http://www.w3.org/2000/svg}rect")][1:]
    widths = [float(bar["width"]) for bar in bars]
    assert widths == pytest.approx([max(widths) * count / 3 for count in (1, 1, 2, 2, 3)], abs=0.06)
    tops = [float(bar["y"]) for bar in bars]
    assert all(
        b - a > float(bar["height"]) for a, b, bar in zip(tops, tops[1:], bars, strict=False)
    )
    assert tops[-1] + float(bars[-1]["height"]) < float(root.attrib["height"])
    numbers = [t for t in root.iter("{http://www.w3.org/2000/svg}text") if (t.text or "").isdigit()]
    for bar, number in zip(
        bars, [one for one in numbers if "text-anchor" not in one.attrib], strict=True
    ):
        gap = float(number.attrib["x"]) - float(bar["x"]) - float(bar["width"])
        assert 0 < gap < 10 and float(bar["y"]) < float(number.attrib["y"])
    assert float(bars[-1]["x"]) + max(widths) + 100 < float(root.attrib["width"])


def test_the_histogram_is_drawn_into_a_file(corpus: Path, tmp_path: Path, capsys: Capture) -> None:
    from xml.etree import ElementTree as ET

    prefix, plot = str(tmp_path / "d"), tmp_path / "lengths.svg"
    command = ["preprocess", "--input", str(corpus), "--output-prefix", prefix]
    assert main([*command, "--tokenizer-type", "ByteTokenizer"]) == 0
    assert main(["inspect", f"{prefix}_text_document", "--plot", str(plot)]) == 0
    root = ET.fromstring(plot.read_text(encoding="utf-8"))
    texts = [part.text or "" for part in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0].endswith("document lengths in tokens")
    shown = capsys.readouterr().out
    for name, count in zip(texts[1::2], texts[2::2], strict=True):
        assert any(line.split()[-1:] == [count] and name in line for line in shown.splitlines())
    assert sum(int(count.replace(",", "")) for count in texts[2::2]) == 300
