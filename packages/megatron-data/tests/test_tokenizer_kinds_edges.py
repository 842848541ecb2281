"""Edges of sentencepiece and tiktoken tokenizers: fingerprints, threads, ids of special tokens."""

import base64
import hashlib
import io
import json
import struct

import pytest
from megatron_data.tokenizers import SentencePieceTokenizer, TikTokenizer, tik_token
from megatron_data.tokenizers.tik_token import PATTERNS, SPECIAL_TOKENS

sentencepiece = pytest.importorskip("sentencepiece")
tiktoken = pytest.importorskip("tiktoken")

TOKENS = [*(bytes([number]) for number in range(256)), b"th", b"the"]


def vocabulary() -> bytes:
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode()}
        for rank, token in enumerate(TOKENS)
    ]
    return json.dumps(entries).encode()


def test_a_fingerprint_of_tiktoken_is_that_of_names_pattern_and_tokens() -> None:
    """Manifests of datasets store it, so every version must compute the same."""
    names = [*SPECIAL_TOKENS, "<SPECIAL_7>", "<SPECIAL_8>"]
    head = json.dumps(["tiktoken", PATTERNS["v1"], names], separators=(",", ":"))
    content = head.encode() + b"".join(struct.pack("<I", len(one)) + one for one in TOKENS)
    made = TikTokenizer(vocabulary(), pattern="v1", num_special_tokens=9)
    assert made.fingerprint == f"sha256:{hashlib.sha256(content).hexdigest()}"


def test_a_machine_of_an_unknown_number_of_cores_has_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[object] = []

    class Encoding(tiktoken.Encoding):  # type: ignore[misc]
        def encode_batch(self, texts: list[str], **options: object) -> object:
            seen.append(options["num_threads"])
            return super().encode_batch(texts, **options)

    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.setattr(tiktoken, "Encoding", Encoding)
    monkeypatch.setattr(tik_token.os, "cpu_count", lambda: None)
    made = TikTokenizer(vocabulary())
    assert made.encode_batch(["the", "a"]) == [[1257], [1097]]
    assert seen == [1]


def test_only_a_beginning_that_encode_adds_is_left_out(texts: list[str]) -> None:
    """Ids are those of the library: <unk> is 0, <s> is 1."""
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts[:40]),
        model_writer=content,
        vocab_size=60,
        model_type="bpe",
        minloglevel=2,
    )
    plain = sentencepiece.SentencePieceProcessor(model_proto=content.getvalue())
    alone = SentencePieceTokenizer(content.getvalue())
    begun = SentencePieceTokenizer(content.getvalue(), begin=True)
    piece = plain.decode([9])
    assert piece
    assert [alone.decode(ids) for ids in ([0], [1], [1, 9])] == [
        plain.decode([0]), "<s>", f"<s>{piece}",
    ]  # fmt: skip
    assert [begun.decode(ids) for ids in ([1], [1, 9], [9], [9, 1])] == [
        "", piece, piece, f"{piece}<s>",
    ]  # fmt: skip
