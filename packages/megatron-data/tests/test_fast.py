"""Tests of encoding with gigatoken: its tokens are correct, or not used."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_data import ByteTokenizer, DataError, HuggingFaceTokenizer, preprocess
from megatron_data.cli import main
from megatron_data.tokenizers import FastTokenizer, fast, fast_tokenizer


class Stand:
    """A stand-in for gigatoken that uses the tokenizers library; wrong for one text."""

    wrong_at = -1
    parallel: bool | None = None

    def __init__(self, definition: bytes) -> None:
        self._reference = HuggingFaceTokenizer(definition)
        self._seen = 0

    @classmethod
    def from_json(cls, definition: bytes) -> "Stand":
        return cls(definition)

    def encode_batch(self, texts: Sequence[str], *, parallel: bool) -> SimpleNamespace:
        Stand.parallel = parallel
        ids = self._reference.encode_batch(texts)
        at = self.wrong_at - self._seen
        if 0 <= at < len(ids):
            ids[at] = [*ids[at][:-1], 7]
        self._seen += len(texts)
        joined = np.array([token for one in ids for token in one], np.uint32)
        offsets = np.cumsum([0, *map(len, ids)])
        data = SimpleNamespace(
            offsets=SimpleNamespace(data=offsets), content=SimpleNamespace(data=joined)
        )
        return SimpleNamespace(layout=data)


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> type[Stand]:
    module = ModuleType("gigatoken")
    module.Tokenizer = Stand  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gigatoken", module)
    monkeypatch.setattr(Stand, "wrong_at", -1)
    return Stand


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".json"}


def both(
    tokenizer: HuggingFaceTokenizer, corpus: Path, tmp_path: Path, workers: int = 1
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    options = {"append_eod": True, "chunk_bytes": 5000, "workers": workers}
    preprocess([corpus], tmp_path / "slow" / "o", tokenizer, **options)  # type: ignore[arg-type]
    preprocess(
        [corpus],
        tmp_path / "fast" / "o",
        fast_tokenizer(tokenizer),
        **options,  # type: ignore[arg-type]
    )
    return files(tmp_path / "slow"), files(tmp_path / "fast")


@pytest.fixture
def mixed(texts: list[str], tmp_path: Path) -> Path:
    """Returns documents of sentences, some of them empty."""
    import json

    path = tmp_path / "mixed.jsonl"
    rows = [
        *([texts[0], "", texts[1]], [], "", ["", ""], [texts[2]], texts[3]),
        *(texts[number : number + number % 4] for number in range(100)),
        *texts[100:],
    ]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


def test_joined_tokens_make_the_same_files(
    tokenizer: HuggingFaceTokenizer, mixed: Path, tmp_path: Path, stand: type[Stand]
) -> None:
    slow, quick = both(tokenizer, mixed, tmp_path)
    assert slow == quick and len(slow) == 2


@pytest.mark.parametrize("wrong_at", [0, 199, 250])
def test_gigatoken_is_dropped_with_a_warning_after_one_wrong_token(
    wrong_at: int,
    tokenizer: HuggingFaceTokenizer,
    corpus: Path,
    tmp_path: Path,
    stand: type[Stand],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stand, "wrong_at", wrong_at)
    monkeypatch.setattr(fast, "CHECKED_EVERY", 50)
    slow, quick = both(tokenizer, corpus, tmp_path)
    assert slow == quick
    warnings = [message for message in caplog.messages if "give different tokens" in message]
    assert len(warnings) == 1 and warnings[0].endswith("; the run starts again without gigatoken")


def test_unsupported_tokenizers_are_reported(
    tokenizer: HuggingFaceTokenizer,
    corpus: Path,
    tmp_path: Path,
    stand: type[Stand],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = ByteTokenizer()
    assert fast_tokenizer(plain) is plain
    assert caplog.messages == ["gigatoken is not used: it does not support ByteTokenizer"]

    def refuse(definition: bytes) -> None:
        raise ValueError("no Unigram")

    monkeypatch.setattr(stand, "from_json", refuse)
    assert fast_tokenizer(tokenizer) is tokenizer
    assert caplog.messages[1:] == [
        "gigatoken does not support this tokenizer: no Unigram; the tokenizers library is used"
    ]
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    with pytest.raises(DataError, match=r"megatron-data\[fast\]"):
        fast_tokenizer(tokenizer)


def test_gigatoken_itself_gives_the_same_files(
    tokenizer: HuggingFaceTokenizer,
    mixed: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("gigatoken")
    slow, quick = both(tokenizer, mixed, tmp_path, workers=2)
    assert slow == quick and not caplog.messages
    tokenizer.save(tmp_path / "tokenizer")
    command = ["preprocess", "--input", str(mixed), "--output-prefix", str(tmp_path / "c" / "o")]
    command += ["--tokenizer-model", str(tmp_path / "tokenizer"), "--append-eod", "--fast"]
    assert main(command) == 0
    assert not capsys.readouterr().err
    assert files(tmp_path / "c") == slow


def test_gigatoken_agrees_on_odd_texts(tokenizer: HuggingFaceTokenizer) -> None:
    pytest.importorskip("gigatoken")
    made = FastTokenizer(tokenizer)

    @settings(max_examples=200, deadline=None, database=None)
    @given(
        st.lists(
            st.one_of(
                st.text(max_size=20),
                st.sampled_from(["<|endoftext|>", "the whale\n\n\n the", "x<|endoftext|>y", ""]),
            ),
            max_size=6,
        )
    )
    def holds(texts: list[str]) -> None:
        assert made.encode_batch(texts) == tokenizer.encode_batch(texts)

    holds()


def test_the_first_texts_and_every_500th_are_compared(
    tokenizer: HuggingFaceTokenizer, stand: type[Stand], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the class says: 200 texts, and then texts 500, 1000 and so on, counted over all calls."""
    compared: list[str] = []
    made = FastTokenizer(tokenizer)

    def watched(texts: Sequence[str]) -> list[list[int]]:
        compared.extend(texts)
        return HuggingFaceTokenizer.encode_batch(tokenizer, texts)

    monkeypatch.setattr(tokenizer, "encode_batch", watched)
    texts = [f"{number}" for number in range(1300)]
    for start, end in ((0, 150), (150, 500), (500, 500), (500, 1001), (1001, 1300)):
        made.encode_batch(texts[start:end])
    assert compared == [*texts[:200], "500", "1000"]
    assert (fast.CHECKED_CHARACTERS, fast.CHECKED_SHARE) == (200_000, 200)
    monkeypatch.setattr(fast, "CHECKED_CHARACTERS", 80)
    compared.clear()
    FastTokenizer(tokenizer).encode_batch(["ten " * 10] * 200)  # 80 + 8000 // 200 characters
    assert len(compared) == 3
    tokens, lengths = made.encode_joined([])
    assert (tokens.shape, lengths.shape, made.encode_batch([])) == ((0,), (0,), [])
    assert made.encode_batch(["b", "", "c d"]) == [
        HuggingFaceTokenizer.encode(tokenizer, text) for text in ("b", "", "c d")
    ]
    monkeypatch.setattr(stand, "wrong_at", 0)
    with pytest.raises(fast.MismatchError, match=r"tokens for 'a{60}'$"):
        FastTokenizer(tokenizer).encode_batch(["a" * 61])


def test_gigatoken_has_threads_unless_the_environment_forbids_them(
    tokenizer: HuggingFaceTokenizer, stand: type[Stand], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = FastTokenizer(tokenizer)
    for value, parallel in (("true", True), ("false", False)):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", value)
        assert made.encode_batch(["the sea"]) == [tokenizer.encode("the sea")]
        assert stand.parallel is parallel
