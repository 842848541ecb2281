"""SentencePiece and tiktoken tokenizers give the token ids of megatron-core's classes."""

import base64
import io
import json

import pytest
from megatron_data.tokenizers import SentencePieceTokenizer, TikTokenizer

sentencepiece = pytest.importorskip("sentencepiece")
pytest.importorskip("tiktoken")
libraries = "megatron.core.tokenizers.text.libraries"
of_sentencepiece = pytest.importorskip(f"{libraries}.sentencepiece_tokenizer")
of_tiktoken = pytest.importorskip(f"{libraries}.tiktoken_tokenizer")

TEXTS = [
    "the whale sees the ship, and theSea",
    "  two  spaces\n\tand a tab ",
    "a <EOD>ship<extra_id_1> sails</s> on <s>the white sea",
    "naïve 日本 12345 DON'T <pad><SPECIAL_9>",
    "",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 3),
        model_writer=content,
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("model") / "tokenizer.model"
    path.write_bytes(content.getvalue())
    return path


def test_a_sentencepiece_model(model):
    theirs = of_sentencepiece.SentencePieceTokenizer(str(model))
    ours = SentencePieceTokenizer.load(model)
    assert [ours.encode(text) for text in TEXTS] == [theirs.text_to_ids(text) for text in TEXTS]
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_id, theirs.eos_id)


def test_a_sentencepiece_model_with_added_tokens(model):
    ours = SentencePieceTokenizer.load(model, added_tokens=True, extra_ids=2)
    names = ["<CLS>", "<SEP>", "<EOD>", "<MASK>", "<PAD>", "<s>", "</s>"]
    theirs = of_sentencepiece.SentencePieceTokenizer(
        str(model),
        special_tokens=[*names, "<extra_id_0>", "<extra_id_1>"],
        legacy=True,
        trim_spm_separator_after_special_token=False,
    )
    assert ours.vocab_size == theirs.vocab_size == 327
    assert [ours.token_id(name) for name in names] == [theirs.token_to_id(name) for name in names]
    assert [ours.encode(text) for text in TEXTS] == [theirs.text_to_ids(text) for text in TEXTS]


@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_a_tiktoken_vocabulary(pattern, tmp_path):
    words = ["eS", "th", "he", "the", " the", "wh", "al", "whal", "whale", "DO", "N'", " s", "12"]
    tokens = [*(bytes([n]) for n in range(256)), *(word.encode() for word in words)]
    path = tmp_path / "vocabulary.json"
    entries = [
        {"rank": n, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for n, token in enumerate(tokens)
    ]
    path.write_text(json.dumps(entries))
    theirs = of_tiktoken.TikTokenTokenizer(
        str(path), num_special_tokens=20, pattern=pattern, vocab_size=len(tokens) + 18
    )
    ours = TikTokenizer.load(
        path, num_special_tokens=20, pattern=pattern, vocab_size=len(tokens) + 18
    )
    assert [ours.encode(text) for text in TEXTS] == [theirs.text_to_ids(text) for text in TEXTS]
    assert ours.vocab_size == theirs.vocab_size
    assert (ours.bos_id, ours.eos_id, ours.pad_id, ours.eod_id) == (
        theirs.bos_id,
        theirs.eos_id,
        theirs.pad_id,
        theirs.eod,
    )
