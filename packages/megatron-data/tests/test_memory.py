"""Peak memory of a process, measured by the kernel."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_data import HuggingFaceTokenizer

SCRIPT = """
import resource, sys
from megatron_data import load_tokenizer, preprocess
preprocess([sys.argv[1]], sys.argv[2], load_tokenizer(sys.argv[3]), append_eod=True)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def peak(corpus: Path, tokenizer: Path, folder: Path) -> int:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(corpus), str(folder / "o"), str(tokenizer)],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def lines(path: Path, texts: list[str], megabytes: float, number: int) -> Path:
    whole = "".join(texts)
    text = whole * (int(megabytes * 1e6) // len(whole.encode()) + 1)
    line = json.dumps({"text": text}, ensure_ascii=False)
    path.write_text((line + "\n") * number, encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("normalizer", [None, {"type": "NFKC"}])
def test_documents_of_a_megabyte_take_less_than_a_gigabyte(
    normalizer: object, tokenizer: HuggingFaceTokenizer, texts: list[str], tmp_path: Path
) -> None:
    """Includes a tokenizer for which texts cannot be split."""
    content = json.loads(tokenizer.definition) | {"normalizer": normalizer}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    corpus = lines(tmp_path / "a.jsonl", texts, 1.0, 12)
    found = peak(corpus, tmp_path, tmp_path)
    print(f"{normalizer}: {found / 1e9:.2f} GB")
    assert found < 1e9


@pytest.mark.slow
def test_a_long_document_that_can_be_split_takes_no_more(
    tokenizer: HuggingFaceTokenizer, texts: list[str], tmp_path: Path
) -> None:
    tokenizer.save(tmp_path)
    found = peak(lines(tmp_path / "a.jsonl", texts, 30.0, 1), tmp_path, tmp_path)
    print(f"one of 30 MB: {found / 1e9:.2f} GB")
    assert found < 1e9
