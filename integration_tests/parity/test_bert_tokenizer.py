"""Tokens of BERT's vocabularies equal those of transformers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_data.tokenizers import bert_tokenizer, train_wordpiece

transformers = pytest.importorskip("transformers")

TEXT = (
    "Call me Ishmael. Some years ago — never mind how long precisely — having little money, "
    "I thought I would sail about: naïve café, Ünïcode, 東京, and (of course) e-mail@example.org! "
)


@pytest.fixture(scope="module", params=[True, False], ids=["lower", "cased"])
def pair(request, tmp_path_factory):
    """Returns our tokenizer and that of transformers for one vocabulary."""
    lower = request.param
    trained = train_wordpiece([TEXT * 20], 160, lower_case=lower)
    path = tmp_path_factory.mktemp("bert") / "vocab.txt"
    path.write_text("".join(f"{trained.token(n)}\n" for n in range(trained.vocab_size)))
    vocabulary = {line: n for n, line in enumerate(path.read_text().splitlines())}
    theirs = transformers.BertTokenizer(vocab=vocabulary, do_lower_case=lower)
    return bert_tokenizer(path, lower_case=lower), theirs


@settings(max_examples=150, deadline=None)
@given(text=st.one_of(st.text(max_size=60), st.lists(st.sampled_from(TEXT.split())).map(" ".join)))
def test_tokens_equal(pair, text: str) -> None:
    ours, theirs = pair
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)


def test_special_tokens_equal(pair) -> None:
    ours, theirs = pair
    for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"):
        assert ours.token_id(token) == theirs.convert_tokens_to_ids(token)
