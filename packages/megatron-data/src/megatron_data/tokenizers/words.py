"""Words of texts with their counts, in an order that does not depend on the process.

The trainers of the `tokenizers` library count words in a hash table with another random seed in
each process. Its order decides the ids of word pieces, and the order in which numbers are added.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import orjson
import tokenizers
from tokenizers import pre_tokenizers

from megatron_data.tokenizers.text_splitting import SEGMENT_CHARACTERS, split_pattern, split_text

_AT_ONCE = 4096  # repetitions of a word in one text


def count_words(texts: Iterable[str], tokenizer: tokenizers.Tokenizer) -> list[tuple[str, int]]:
    """Returns the words of a tokenizer's pre-tokenizer, sorted, with their counts.

    Args:
        texts: Texts.
        tokenizer: A tokenizer whose definition `split_pattern` recognizes.
    """
    pattern = split_pattern(orjson.loads(tokenizer.to_str()))
    normalize = tokenizer.normalizer.normalize_str if tokenizer.normalizer else str
    pre_tokenizer: pre_tokenizers.PreTokenizer = tokenizer.pre_tokenizer
    counts: Counter[str] = Counter()
    for text in texts:
        segments = (text,) if pattern is None else split_text(text, SEGMENT_CHARACTERS, pattern)
        for segment in segments:
            words = pre_tokenizer.pre_tokenize_str(normalize(segment))
            counts.update(word for word, _ in words)
    return sorted(counts.items())


def as_texts(counts: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Yields texts of words between spaces, in which every word is repeated by its count."""
    for word, count in counts:
        for start in range(0, count, _AT_ONCE):
            yield " ".join([word] * min(_AT_ONCE, count - start))
