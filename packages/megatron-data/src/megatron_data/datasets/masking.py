"""Hiding words of a text for a model to restore: the masking of BERT, SpanBERT and T5.

Sources: Devlin et al., "BERT" (2018), section 3.1; Joshi et al., "SpanBERT" (2019), section 3.1,
for lengths from a geometric distribution. The draws are those of `masked_dataset.py` of
NVIDIA/Megatron-LM in kind and order, so that samples are equal; but with `permutation` Megatron
draws from numpy's global generator, which no two runs have in the same state, and here all draws
come from the sample's own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import DataError
from megatron_data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_data.tokenizers.protocol import Tokenizer
from megatron_data.tokenizers.wordpiece import CONTINUATION_PREFIX

_GEOMETRIC = 0.2  # SpanBERT's p


@dataclass(frozen=True)
class WordPieces:
    """What masking has to know of a vocabulary.

    Attributes:
        continuations: True for tokens that go on with a word, `##` in WordPiece, bool `[V]`.
        cls_id: Begins a BERT sample.
        sep_id: Ends a segment of a BERT sample.
        mask_id: Stands for a token to restore.
        bos_id: Begins a T5 decoder's input.
        eos_id: Ends a T5 decoder's output.
        sentinel_ids: Stand for the spans of a T5 sample, in this order.
    """

    continuations: NDArray[np.bool_]
    cls_id: int
    sep_id: int
    mask_id: int
    bos_id: int | None = None
    eos_id: int | None = None
    sentinel_ids: tuple[int, ...] = ()

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> "WordPieces":
        """Reads them off a WordPiece tokenizer, such as one of `bert_tokenizer`.

        Raises:
            DataError: It has no word word_pieces, or lacks [CLS], [SEP] or [MASK].
        """
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise DataError(
                f"a {type(tokenizer).__name__} has no word pieces; masked datasets need one "
                "of BERT's kind"
            )
        needed = [tokenizer.token_id(token) for token in ("[CLS]", "[SEP]", "[MASK]")]
        cls_id, sep_id, mask_id = needed
        if cls_id is None or sep_id is None or mask_id is None:
            raise DataError(
                "this tokenizer lacks [CLS], [SEP] or [MASK]; masked datasets need one of "
                "BERT's kind"
            )
        names = (tokenizer.token(number) for number in range(tokenizer.vocab_size))
        goes_on = [name is not None and name.startswith(CONTINUATION_PREFIX) for name in names]
        sentinels: list[int] = []
        while (number := tokenizer.token_id(f"<extra_id_{len(sentinels)}>")) is not None:
            sentinels.append(number)
        return cls(
            np.array(goes_on),
            cls_id,
            sep_id,
            mask_id,
            tokenizer.bos_id,
            tokenizer.eos_id,
            tuple(sentinels),
        )


@dataclass(frozen=True)
class MaskingConfig:
    """Which tokens are hidden.

    Raises:
        DataError: A share that is not between 0 and 1, or options that exclude each other.
    """

    probability: float = field(
        default=0.15, metadata={"help": "share of tokens to restore", "flag": "--mask-prob"}
    )
    max_ngram: int = field(default=3, metadata={"help": "longest row of words hidden together"})
    whole_words: bool = field(
        default=True, metadata={"help": "hide all pieces of a word, or each by itself"}
    )
    longer_ngrams: bool = field(
        default=False, metadata={"help": "prefer long rows of words to short ones"}
    )
    geometric: bool = field(
        default=False, metadata={"help": "draw the words of a row from SpanBERT's distribution"}
    )
    permutation: bool = field(
        default=False, metadata={"help": "swap as many other tokens among themselves"}
    )

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1:
            raise DataError(f"masking probability {self.probability}; give one between 0 and 1")
        if self.max_ngram < 1:
            raise DataError(f"rows of {self.max_ngram} masked words; give at least 1")
        if self.geometric and self.permutation:
            raise DataError("masking by geometric lengths and permutation exclude each other")

    def ngram_shares(self) -> NDArray[np.float64]:
        """Cumulative probability of rows of 1, 2, … words: each in inverse proportion to it."""
        shares = 1.0 / np.arange(1, self.max_ngram + 1)
        shares = shares / shares.sum()
        if self.longer_ngrams:
            shares = shares[::-1]
        shares = (shares / shares.sum()).cumsum()
        return np.asarray(shares / shares[-1])


class MaskedSpan(NamedTuple):
    """Tokens hidden together: where they are, and what they were."""

    positions: list[int]
    labels: list[int]


class MaskedText(NamedTuple):
    """A text with words hidden.

    Attributes:
        tokens: With replacements.
        positions: Of the tokens to restore, in order.
        labels: What they are.
        spans: Rows of words hidden together, in order.
    """

    tokens: list[int]
    positions: list[int]
    labels: list[int]
    spans: list[MaskedSpan]


def mask_tokens(
    tokens: Sequence[int],
    target_length: int,
    random: np.random.RandomState,
    config: MaskingConfig,
    word_pieces: WordPieces,
    replacement: Callable[[], int | None],
) -> MaskedText:
    """Hides words of a text.

    Args:
        tokens: The text, special tokens included.
        target_length: The length that the sample was to have, which bounds how many are hidden.
        random: Of the sample.
        config: Which tokens are hidden.
        word_pieces: Of the vocabulary.
        replacement: Draws what takes a token's place, None for itself.

    Raises:
        DataError: A token that the vocabulary does not have.
    """
    words = _words(tokens, config, word_pieces)
    limit = min(config.probability * target_length, max(1, round(len(tokens) * config.probability)))
    shares = config.ngram_shares()
    order = np.arange(len(words))
    random.shuffle(order)
    masked, hidden = list(tokens), dict[int, int]()
    spans: list[MaskedSpan] = []
    for word in order.tolist():
        if len(hidden) >= limit:
            break
        if config.geometric:
            longest = min(int(random.geometric(_GEOMETRIC)), config.max_ngram)
        else:
            longest = int(shares.searchsorted(random.random_sample(), side="right")) + 1
        row = _row_that_fits(words, word, longest, limit - len(hidden))
        if row is None or any(position in hidden for position in row):
            continue
        for position in row:
            new = replacement()
            hidden[position] = tokens[position]
            if new is not None:
                masked[position] = new
        spans.append(MaskedSpan(row, [tokens[position] for position in row]))
    if config.permutation:
        random.shuffle(order)
        _swap(masked, hidden, words, order, limit, shares, random)
    positions = sorted(hidden)
    return MaskedText(
        masked,
        positions,
        [hidden[position] for position in positions],
        sorted(spans, key=lambda span: span.positions[0]),
    )


def _words(
    tokens: Sequence[int], config: MaskingConfig, word_pieces: WordPieces
) -> list[list[int]]:
    """Positions of every word; special tokens are none."""
    special = (word_pieces.cls_id, word_pieces.sep_id)
    words: list[list[int]] = []
    array = np.asarray(tokens)
    if len(array) and not 0 <= array.min() <= array.max() < len(word_pieces.continuations):
        raise DataError(
            f"tokens {array.min()} to {array.max()} in a sample, the vocabulary has "
            f"{len(word_pieces.continuations)}; it is not the one the text was preprocessed with"
        )
    goes_on = word_pieces.continuations[array].tolist() if len(array) else []
    for position, token in enumerate(tokens):
        if token in special:
            continue
        if goes_on[position] and config.whole_words and words:
            words[-1].append(position)
        else:
            words.append([position])
    return words


def _row_that_fits(
    words: list[list[int]], word: int, longest: int, room: float
) -> list[int] | None:
    """Positions of the longest row of words from `word` on that has room."""
    for count in range(longest, 0, -1):
        row = [position for each in words[word : word + count] for position in each]
        if len(row) <= room:
            return row
    return None


def _swap(
    masked: list[int],
    hidden: dict[int, int],
    words: list[list[int]],
    order: NDArray[np.int64],
    limit: float,
    shares: NDArray[np.float64],
    random: np.random.RandomState,
) -> None:
    """Permutes as many tokens as are hidden among themselves; they are to be restored, too."""
    chosen: set[int] = set()
    for word in order.tolist():
        if len(chosen) >= limit:
            break
        longest = int(shares.searchsorted(random.random_sample(), side="right")) + 1
        row = _row_that_fits(words, word, longest, limit - len(chosen))
        if row is not None and not any(place in hidden or place in chosen for place in row):
            chosen.update(row)
    places = sorted(chosen)
    sources = np.array(places, np.int64)
    random.shuffle(sources)
    before = list(masked)
    for place, source in zip(places, sources.tolist(), strict=True):
        masked[place] = before[source]
        hidden[place] = before[place]
