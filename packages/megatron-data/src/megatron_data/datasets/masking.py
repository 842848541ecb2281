"""Token masking of BERT, SpanBERT and T5.

Sources: Devlin et al., "BERT" (2018), section 3.1; Joshi et al., "SpanBERT" (2019), section 3.1,
for span lengths from a geometric distribution. Random numbers are drawn as in `masked_dataset.py`
of NVIDIA/Megatron-LM, so that samples are equal. The exception is `permutation`: Megatron draws
from numpy's global generator, whose state is not reproducible; here all numbers come from the
generator of the sample.
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
    """Properties of a vocabulary that masking needs.

    Attributes:
        continuations: True for tokens that continue a word (`##` in WordPiece), bool `[v]`.
        cls_id: Token that begins a BERT sample.
        sep_id: Token that ends a segment of a BERT sample.
        mask_id: Token that replaces a masked token.
        bos_id: Token that begins the input of a T5 decoder.
        eos_id: Token that ends the output of a T5 decoder.
        sentinel_ids: Tokens that replace the masked spans of a T5 sample, in order.
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
        """Returns the properties of a WordPiece tokenizer, such as that of `bert_tokenizer`.

        Raises:
            DataError: The tokenizer is not a WordPiece tokenizer, or lacks [CLS], [SEP] or [MASK].
        """
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise DataError(
                f"a {type(tokenizer).__name__} has no word pieces; masked datasets need a "
                "WordPiece tokenizer such as BERT's"
            )
        token_ids = [tokenizer.token_id(token) for token in ("[CLS]", "[SEP]", "[MASK]")]
        cls_id, sep_id, mask_id = token_ids
        if cls_id is None or sep_id is None or mask_id is None:
            raise DataError(
                "the tokenizer lacks [CLS], [SEP] or [MASK]; masked datasets need a WordPiece "
                "tokenizer such as BERT's"
            )
        names = (tokenizer.token(number) for number in range(tokenizer.vocab_size))
        continues_word = [
            name is not None and name.startswith(CONTINUATION_PREFIX) for name in names
        ]
        sentinels: list[int] = []
        while (number := tokenizer.token_id(f"<extra_id_{len(sentinels)}>")) is not None:
            sentinels.append(number)
        return cls(
            np.array(continues_word),
            cls_id,
            sep_id,
            mask_id,
            tokenizer.bos_id,
            tokenizer.eos_id,
            tuple(sentinels),
        )


@dataclass(frozen=True)
class MaskingConfig:
    """Configuration of masking.

    Raises:
        DataError: A value is out of range, or `geometric` and `permutation` are both set.
    """

    probability: float = field(
        default=0.15, metadata={"help": "fraction of tokens to mask", "flag": "--mask-prob"}
    )
    max_ngram: int = field(default=3, metadata={"help": "largest number of words in a masked span"})
    whole_words: bool = field(
        default=True, metadata={"help": "mask whole words instead of single pieces"}
    )
    longer_ngrams: bool = field(
        default=False, metadata={"help": "prefer spans of many words to spans of few"}
    )
    geometric: bool = field(
        default=False,
        metadata={"help": "draw the number of words in a span from SpanBERT's distribution"},
    )
    permutation: bool = field(
        default=False, metadata={"help": "permute as many other tokens, which are predicted too"}
    )

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1:
            raise DataError(f"masking probability {self.probability}; give one between 0 and 1")
        if self.max_ngram < 1:
            raise DataError(f"max_ngram {self.max_ngram}; give at least 1")
        if self.geometric and self.permutation:
            raise DataError("geometric and permutation exclude each other; set one of them")

    def ngram_shares(self) -> NDArray[np.float64]:
        """Returns the cumulative probability of spans of 1, 2, … words, float64 `[max_ngram]`.

        A span of n words has a probability proportional to 1/n, or reversed with `longer_ngrams`.
        """
        shares = 1.0 / np.arange(1, self.max_ngram + 1)
        shares = shares / shares.sum()
        if self.longer_ngrams:
            shares = shares[::-1]
        shares = (shares / shares.sum()).cumsum()
        return np.asarray(shares / shares[-1])


class MaskedSpan(NamedTuple):
    """A masked span.

    Attributes:
        positions: Indices of its tokens in the text.
        labels: Original tokens.
    """

    positions: list[int]
    labels: list[int]


class MaskedText(NamedTuple):
    """A text with masked words.

    Attributes:
        tokens: Tokens after masking.
        positions: Indices of the tokens to predict, in order.
        labels: Original tokens at `positions`.
        spans: Masked spans, in order.
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
    """Masks words of a text.

    Args:
        tokens: Tokens of the text, including special tokens.
        target_length: Target length of the sample, which limits the number of masked tokens.
        random: Random generator of the sample.
        config: Configuration of masking.
        word_pieces: Properties of the vocabulary.
        replacement: Draws the replacement of a token; None leaves it unchanged.

    Raises:
        DataError: A token is not in the vocabulary.
    """
    words = _words(tokens, config, word_pieces)
    limit = min(config.probability * target_length, max(1, round(len(tokens) * config.probability)))
    shares = config.ngram_shares()
    order = np.arange(len(words))
    random.shuffle(order)
    masked, original_tokens = list(tokens), dict[int, int]()
    spans: list[MaskedSpan] = []
    for word in order.tolist():
        if len(original_tokens) >= limit:
            break
        if config.geometric:
            longest = min(int(random.geometric(_GEOMETRIC)), config.max_ngram)
        else:
            longest = int(shares.searchsorted(random.random_sample(), side="right")) + 1
        span = _longest_span(words, word, longest, limit - len(original_tokens))
        if span is None or any(position in original_tokens for position in span):
            continue
        for position in span:
            new = replacement()
            original_tokens[position] = tokens[position]
            if new is not None:
                masked[position] = new
        spans.append(MaskedSpan(span, [tokens[position] for position in span]))
    if config.permutation:
        random.shuffle(order)
        _swap(masked, original_tokens, words, order, limit, shares, random)
    positions = sorted(original_tokens)
    return MaskedText(
        masked,
        positions,
        [original_tokens[position] for position in positions],
        sorted(spans, key=lambda span: span.positions[0]),
    )


def _words(
    tokens: Sequence[int], config: MaskingConfig, word_pieces: WordPieces
) -> list[list[int]]:
    """Returns the positions of the tokens of each word, without special tokens."""
    special = (word_pieces.cls_id, word_pieces.sep_id)
    words: list[list[int]] = []
    array = np.asarray(tokens)
    if len(array) and not 0 <= array.min() <= array.max() < len(word_pieces.continuations):
        raise DataError(
            f"a sample has tokens {array.min()} to {array.max()}, but the vocabulary has "
            f"{len(word_pieces.continuations)} tokens; give the tokenizer of the dataset"
        )
    continues_word = word_pieces.continuations[array].tolist() if len(array) else []
    for position, token in enumerate(tokens):
        if token in special:
            continue
        if continues_word[position] and config.whole_words and words:
            words[-1].append(position)
        else:
            words.append([position])
    return words


def _longest_span(words: list[list[int]], word: int, longest: int, room: float) -> list[int] | None:
    """Returns the positions of the longest span from `word` on that fits, or None."""
    for count in range(longest, 0, -1):
        span = [position for positions in words[word : word + count] for position in positions]
        if len(span) <= room:
            return span
    return None


def _swap(
    masked: list[int],
    original_tokens: dict[int, int],
    words: list[list[int]],
    order: NDArray[np.int64],
    limit: float,
    shares: NDArray[np.float64],
    random: np.random.RandomState,
) -> None:
    """Permutes up to `limit` tokens that are not masked, and adds them to the labels."""
    chosen: set[int] = set()
    for word in order.tolist():
        if len(chosen) >= limit:
            break
        longest = int(shares.searchsorted(random.random_sample(), side="right")) + 1
        span = _longest_span(words, word, longest, limit - len(chosen))
        if span is not None and not any(
            position in original_tokens or position in chosen for position in span
        ):
            chosen.update(span)
    positions = sorted(chosen)
    sources = np.array(positions, np.int64)
    random.shuffle(sources)
    unpermuted = list(masked)
    for position, source in zip(positions, sources.tolist(), strict=True):
        masked[position] = unpermuted[source]
        original_tokens[position] = unpermuted[position]
