"""Fill-in-the-middle: rearranges documents so that a model learns to infill text.

A document is cut at two points into prefix, middle and suffix, which are rearranged with a token
before each: PRE prefix SUF suffix MID middle (PSM), or PRE SUF suffix MID prefix middle (SPM). A
left-to-right model trained on such text generates the text between a prefix and a suffix.

Source: Bavarian et al., "Efficient Training of Language Models to Fill in the Middle" (2022), PSM
and the second variant of SPM, with the options of Megatron's `--fim-data`.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from megatron_data.datasets.fim_config import FIMConfig
from megatron_data.errors import DataError
from megatron_data.order.permutation import hash_integers
from megatron_data.tokenizers.protocol import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MOST_BYTES = 4  # bytes of a character in UTF-8


class FillInTheMiddle:
    """Rearranges the documents of samples. Random draws depend only on seed and sample index.

    Args:
        config: Configuration.
        tokenizer: Tokenizer of the samples. Its end-of-document token separates documents.
        seed: Seed of the random draws. Defaults to 1234.

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
        """Returns a copy with another seed."""
        return FillInTheMiddle(self.config, self.tokenizer, seed)

    def __call__(self, text: NDArray[np.int64], sample: int, room: int) -> NDArray[np.int64]:
        """Rearranges the documents of a sample.

        The added tokens make the text longer, and it is truncated to `room` tokens. It may also
        become shorter, if its parts are tokenized to fewer tokens.

        Args:
            text: Tokens of the sample, int64 `[n]`.
            sample: Index of the sample.
            room: Tokens of a full sample.

        Returns:
            Tokens, int64 `[m]` with `m <= room`.
        """
        random = np.random.RandomState(hash_integers(self.seed, sample) % (1 << 32))
        parts: list[NDArray[np.int64]] = []
        for document, end in _cut(text, self.tokenizer.eod_id):
            parts += [*self._document(document, random), end]
        return np.concatenate(parts)[:room]

    def _document(
        self, tokens: NDArray[np.int64], random: np.random.RandomState
    ) -> Iterator[NDArray[np.int64]]:
        """Yields a document, or its fragments, some of them rearranged."""
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
        """Rearranges one text, cut at two random characters.

        Incomplete characters at the ends of a sample stay in the prefix or suffix. A text that
        begins with `no_prefix`, is empty or cannot be decoded is returned unchanged.

        Args:
            tokens: Tokens of the text, int64 `[n]`.
            random: Draws the two cuts and the order.

        Returns:
            Tokens of the three parts, each after its special token, int64 `[m]`.
        """
        found = self._whole_characters(tokens)
        if found is None:
            return tokens
        first, last, decoded = found
        no_prefix = self.config.no_prefix
        if no_prefix is not None and decoded.startswith(no_prefix):
            return tokens
        begin, end = sorted(random.randint(0, len(decoded) + 1, 2).tolist())
        parts = [decoded[:begin], decoded[begin:end], decoded[end:]]
        encoded = self.tokenizer.encode_batch(parts)
        prefix, middle, suffix = (np.array(ids, np.int64) for ids in encoded)
        prefix = np.concatenate([tokens[:first], prefix])
        suffix = np.concatenate([suffix, tokens[last:]])
        pre, mid, suf = ([name] for name in (self._prefix, self._middle, self._suffix))
        if random.random_sample() < self.config.spm_rate:
            return np.concatenate([pre, suf, suffix, mid, prefix, middle])
        return np.concatenate([pre, prefix, suf, suffix, mid, middle])

    def _whole_characters(self, tokens: NDArray[np.int64]) -> tuple[int, int, str] | None:
        """Returns begin, end and text of the tokens that decode to whole characters, if any do."""
        for num_omitted in range(2 * _MOST_BYTES - 1):
            for first in range(max(num_omitted - _MOST_BYTES + 1, 0), min(num_omitted, 3) + 1):
                last = len(tokens) - (num_omitted - first)
                decoded = self.tokenizer.decode(tokens[first:last].tolist())
                if decoded and _REPLACEMENT not in decoded:
                    return first, last, decoded
        return None

    def _token(self, name: str) -> int:
        ids = self.tokenizer.encode(name)
        if len(ids) != 1:
            raise DataError(
                f"the tokenizer has no token {name!r} (it encodes it as {len(ids)} tokens); give "
                "another token, or add it to the vocabulary"
            )
        return ids[0]


def _cut(
    tokens: NDArray[np.int64], separator: int | None
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yields the tokens between separators, each with its separator or an empty array."""
    begin = 0
    if separator is not None:
        for index in np.flatnonzero(tokens == separator).tolist():
            yield tokens[begin:index], tokens[index : index + 1]
            begin = index + 1
    yield tokens[begin:], tokens[:0]
