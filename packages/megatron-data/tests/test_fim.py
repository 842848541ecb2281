"""Fill-in-the-middle: rearranged documents can be reassembled."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_data import DataError, HuggingFaceTokenizer, build_gpt_datasets, train_bpe
from megatron_data.datasets import FillInTheMiddle, FIMConfig

NAMES = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<file>", "<|endoftext|>")


@pytest.fixture(scope="module")
def fim_tokenizer(texts: list[str]) -> HuggingFaceTokenizer:
    """Returns a byte-level tokenizer with the tokens of Megatron's `--fim-*-token`."""
    import tokenizers

    trained = tokenizers.Tokenizer.from_str(train_bpe(texts, 340).definition.decode())
    trained.add_special_tokens(list(NAMES))
    return HuggingFaceTokenizer(trained.to_str(), {"eod": NAMES[-1]})


def reassembled(tokens: list[int], ids: list[int]) -> list[int]:
    """Returns the original tokens of a text that may be rearranged."""
    prefix, middle, suffix = ids[:3]
    if not tokens or tokens[0] != prefix:
        return tokens
    at_suffix, at_middle = tokens.index(suffix), tokens.index(middle)
    last = tokens[at_suffix + 1 : at_middle]
    if at_suffix == 1:  # SPM: no token separates prefix and middle
        return tokens[at_middle + 1 :] + last
    return tokens[1:at_suffix] + tokens[at_middle + 1 :] + last


@settings(max_examples=150, deadline=None)
@given(
    st.text(st.sampled_from("aeh lnsw.\nü日🐳"), max_size=30),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 2**40),
)
def test_rearranged_text_can_be_reassembled(
    fim_tokenizer, text: str, front: int, back: int, spm_rate: float, seed: int
) -> None:
    """Includes samples whose ends cut a character into bytes."""
    ids = [fim_tokenizer.token_id(name) for name in NAMES]
    infill = FillInTheMiddle(FIMConfig(1.0, spm_rate), fim_tokenizer, seed)
    tokens = np.array(fim_tokenizer.encode(text), np.int64)
    tokens = tokens[front : len(tokens) - back]
    parts = infill.rearrange(tokens, np.random.RandomState(seed % 1000)).tolist()
    whole = reassembled(parts, ids)
    decode = fim_tokenizer.decode
    assert decode(whole) == decode(tokens.tolist())
    if parts[:1] == ids[:1] and spm_rate == 1:
        assert parts[1] == ids[2]


@pytest.mark.parametrize("front", range(4))
@pytest.mark.parametrize("back", range(4))
def test_up_to_three_bytes_of_a_character_stay_at_either_end(
    fim_tokenizer, front: int, back: int
) -> None:
    tokens = fim_tokenizer.encode("🐳 the sea🐳")
    assert len(fim_tokenizer.encode("🐳")) == 4
    tokens = tokens[front : len(tokens) - back]
    pre, mid, suf = (fim_tokenizer.token_id(name) for name in NAMES[:3])
    infill = FillInTheMiddle(FIMConfig(1.0, 0.0), fim_tokenizer)
    parts = infill.rearrange(np.array(tokens), np.random.RandomState(1)).tolist()
    begin, end = -front % 4, -back % 4  # the bytes that are left of a character
    assert [token for token in parts if token in (pre, mid, suf)] == [pre, suf, mid]
    assert parts[: begin + 1] == [pre, *tokens[:begin]]
    assert parts[parts.index(mid) - end : parts.index(mid)] == tokens[len(tokens) - end :]


def test_a_text_is_cut_at_any_character_or_at_its_ends(fim_tokenizer) -> None:
    pre, mid, suf = (fim_tokenizer.token_id(name) for name in NAMES[:3])
    (letter,) = fim_tokenizer.encode("a")
    infill = FillInTheMiddle(FIMConfig(1.0, 0.0), fim_tokenizer)
    for seed in range(12):  # which give all three results
        begin, end = sorted(np.random.RandomState(seed).randint(0, 1 + 1, 2))  # as in Megatron
        found = infill.rearrange(np.array([letter]), np.random.RandomState(seed)).tolist()
        assert found == [
            *(pre, *[letter][:begin]),
            *(suf, *[letter][end:]),
            *(mid, *[letter][begin:end]),
        ]
    assert infill.rearrange(np.array([], np.int64), np.random.RandomState(1)).tolist() == []


@pytest.mark.parametrize("split", [None, "<file>"])
@pytest.mark.parametrize("order", ["stateless", "packed", "compat"])
def test_samples_contain_rearranged_documents(
    write_dataset, fim_tokenizer, texts: list[str], order: str, split: str | None
) -> None:
    ids = [fim_tokenizer.token_id(name) for name in NAMES]
    eod, file = ids[4], ids[3]
    documents = [[*fim_tokenizer.encode(text), file, *fim_tokenizer.encode("the sea"), eod]
                 for text in texts]  # fmt: skip
    prefix = write_dataset(documents)
    options = {"sizes": (40, 0, 0), "sequence_length": 200, "order": order, "split": "1,0,0"}
    options |= {"eod_id": eod, "eod_mask_loss": True}
    plain = build_gpt_datasets(prefix, **options).train
    config = FIMConfig(0.5, 0.5, split_sample=split, fragment_rate=0.7, no_prefix="the sea")
    infill = FillInTheMiddle(config, fim_tokenizer)
    apart = build_gpt_datasets(prefix, **options, infill=infill).train
    again = build_gpt_datasets(prefix, **options, infill=infill).train
    assert plain is not None and apart is not None and again is not None
    backward = {number: again[number] for number in reversed(range(40))}
    changed = fragments = spm = whole_documents = 0
    for number in range(40):
        before, after = plain[number], apart[number]
        for key in before:
            assert before[key].shape == after[key].shape
            np.testing.assert_array_equal(after[key], backward[number][key])
        pieces, originals = (
            _documents(sample["tokens"][sample["document_ids"] >= 0].tolist(), eod)
            for sample in (after, before)
        )
        for piece, original in zip(pieces[:-1], originals, strict=False):
            parts = _documents(piece, file) if split else [piece]
            joined: list[int] = []
            for place, part in enumerate(parts):
                joined += ([file] if place else []) + reassembled(part, ids)
                fragments += place > 0 and part[:1] == [ids[0]]
                changed += part[:1] == [ids[0]]
                spm += part[:2] == [ids[0], ids[2]]
            whole_documents += 1
            assert fim_tokenizer.decode(joined) == fim_tokenizer.decode(original)
    assert whole_documents > 80
    assert abs(changed / whole_documents - (0.35 if split else 0.5)) < 0.15
    assert 0.3 < spm / changed < 0.7
    assert fragments == 0  # "the sea" begins with `no_prefix`


def _documents(tokens: list[int], end: int) -> list[list[int]]:
    cut: list[list[int]] = [[]]
    for token in tokens:
        if token == end:
            cut.append([])
        else:
            cut[-1].append(token)
    return cut


def test_a_vocabulary_without_the_tokens_is_refused(tokenizer: HuggingFaceTokenizer) -> None:
    with pytest.raises(DataError, match="no token '<fim_prefix>'"):
        FillInTheMiddle(FIMConfig(), tokenizer)
    with pytest.raises(DataError, match=r"--fim-spm-rate 1\.5 is not a rate; give 0 to 1"):
        FIMConfig(spm_rate=1.5)
