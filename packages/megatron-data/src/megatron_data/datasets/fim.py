"""Fill in the middle: documents taken apart so that a model learns to complete between two texts.

A document is cut at two places into prefix, middle and suffix, which are put down in another order,
each behind a token that names it: PRE prefix SUF suffix MID middle, or, with the suffix first, PRE
SUF suffix MID prefix middle. A left-to-right model of such text completes what is missing between a
prefix and a suffix.

Source: Bavarian et al., "Efficient Training of Language Models to Fill in the Middle" (2022), PSM
and the second variant of SPM, with the options of Megatron's `--fim-data`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import DataError
from megatron_data.order.permutation import hash_integers
from megatron_data.tokenizers.protocol import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MOST_BYTES = 4  # of a character


@dataclass(frozen=True)
class FIMConfig:
    """What is taken apart, and how.

    Raises:
        DataError: A rate that is not between 0 and 1.
    """

    rate: float = field(
        default=0.5,
        metadata={"help": "share of documents that are taken apart", "flag": "--fim-rate"},
    )
    spm_rate: float = field(
        default=0.5,
        metadata={"help": "share of those with the suffix first", "flag": "--fim-spm-rate"},
    )
    split_sample: str | None = field(
        default=None,
        metadata={
            "help": "token between fragments, such as files, that are taken apart one by one",
            "flag": "--fim-split-sample",
        },
    )
    fragment_rate: float = field(
        default=0.5,
        metadata={
            "help": "share of the fragments of a chosen document that are taken apart",
            "flag": "--fim-fragment-rate",
        },
    )
    no_prefix: str | None = field(
        default=None,
        metadata={"help": "what begins so stays as it is", "flag": "--fim-no-prefix"},
    )
    prefix_token: str = field(
        default="<fim_prefix>",
        metadata={"help": "token before the prefix", "flag": "--fim-prefix-token"},
    )
    middle_token: str = field(
        default="<fim_middle>",
        metadata={"help": "token before the middle", "flag": "--fim-middle-token"},
    )
    suffix_token: str = field(
        default="<fim_suffix>",
        metadata={"help": "token before the suffix", "flag": "--fim-suffix-token"},
    )

    def __post_init__(self) -> None:
        for given in fields(self):
            rate = getattr(self, given.name)
            if isinstance(rate, float | int) and not 0 <= rate <= 1:
                raise DataError(f"{given.metadata['flag']} {rate} is no share; give 0 to 1")


class FillInTheMiddle:
    """Takes the documents of samples apart; what is drawn depends on seed and sample number alone.

    Args:
        config: What is taken apart.
        tokenizer: Of the samples; its end-of-document token tells documents apart.
        seed: Of the draws.

    Raises:
        DataError: The vocabulary lacks one of the tokens.
    """

    def __init__(self, config: FIMConfig, tokenizer: Tokenizer, seed: int = 1234) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.seed = seed
        self._prefix = self._token(config.prefix_token)
        self._middle = self._token(config.middle_token)
        self._suffix = self._token(config.suffix_token)
        self._between = None if config.split_sample is None else self._token(config.split_sample)

    def with_seed(self, seed: int) -> "FillInTheMiddle":
        """Returns the same with other draws."""
        return FillInTheMiddle(self.config, self.tokenizer, seed)

    def __call__(self, text: NDArray[np.int64], sample: int, room: int) -> NDArray[np.int64]:
        """Takes the documents of a sample apart.

        The tokens that name the parts make it longer: what goes beyond the room is cut at the end.
        Where a text gives fewer tokens in parts it may be shorter.

        Args:
            text: Tokens of the sample, int64 `[n]`.
            sample: Its number.
            room: Tokens of a whole sample.

        Returns:
            Tokens, int64, at most `[room]`.
        """
        random = np.random.RandomState(hash_integers(self.seed, sample) % (1 << 32))
        parts: list[NDArray[np.int64]] = []
        for document, end in _cut(text, self.tokenizer.eod_id):
            parts += [*self._document(document, random), end]
        return np.concatenate(parts)[:room]

    def _document(
        self, tokens: NDArray[np.int64], random: np.random.RandomState
    ) -> Iterator[NDArray[np.int64]]:
        """Returns a document, or its fragments one by one; chosen by the rate."""
        if random.random_sample() >= self.config.rate:
            yield tokens
        elif self._between is None or not np.any(tokens == self._between):
            yield self.rearrange(tokens, random)
        else:
            for fragment, end in _cut(tokens, self._between):
                chosen = random.random_sample() < self.config.fragment_rate
                yield self.rearrange(fragment, random) if chosen else fragment
                yield end

    def rearrange(
        self, tokens: NDArray[np.int64], random: np.random.RandomState
    ) -> NDArray[np.int64]:
        """Takes one text apart between two characters, anywhere in it.

        Bytes of a character of which the other bytes are not there, as at the ends of a sample,
        stay where they are in the prefix or suffix. What begins with `no_prefix`, is empty, or is
        no text for other reasons, stays as it is.

        Args:
            tokens: Int64 `[n]`.
            random: Of the two places and the order.

        Returns:
            Tokens of the parts behind the tokens that name them.
        """
        first, last, text = self._whole_characters(tokens)
        without = self.config.no_prefix
        if text is None or (without is not None and text.startswith(without)):
            return tokens
        begin, end = sorted(random.randint(0, len(text) + 1, 2).tolist())
        encoded = self.tokenizer.encode_batch([text[:begin], text[begin:end], text[end:]])
        prefix, middle, suffix = (np.array(ids, np.int64) for ids in encoded)
        prefix = np.concatenate([tokens[:first], prefix])
        suffix = np.concatenate([suffix, tokens[last:]])
        pre, mid, suf = ([name] for name in (self._prefix, self._middle, self._suffix))
        if random.random_sample() < self.config.spm_rate:
            return np.concatenate([pre, suf, suffix, mid, prefix, middle])
        return np.concatenate([pre, prefix, suf, suffix, mid, middle])

    def _whole_characters(self, tokens: NDArray[np.int64]) -> tuple[int, int, str | None]:
        """Returns the part of a text that is whole characters: its first token, its end, itself."""
        for left_out in range(2 * _MOST_BYTES - 1):
            for first in range(max(left_out - _MOST_BYTES + 1, 0), min(left_out, 3) + 1):
                last = len(tokens) - (left_out - first)
                text = self.tokenizer.decode(tokens[first:last].tolist())
                if text and _REPLACEMENT not in text:
                    return first, last, text
        return 0, len(tokens), None

    def _token(self, name: str) -> int:
        ids = self.tokenizer.encode(name)
        if len(ids) != 1:
            raise DataError(
                f"the tokenizer has no token {name!r} (it makes {len(ids)} of it); name the right "
                "one, or add it to the vocabulary"
            )
        return ids[0]


def _cut(
    tokens: NDArray[np.int64], separator: int | None
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Stretches without the separator, and behind each the separator or nothing."""
    begin = 0
    if separator is not None:
        for place in np.flatnonzero(tokens == separator).tolist():
            yield tokens[begin:place], tokens[place : place + 1]
            begin = place + 1
    yield tokens[begin:], tokens[:0]
