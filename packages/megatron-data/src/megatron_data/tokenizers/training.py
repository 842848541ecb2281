"""Trains vocabularies: byte-level BPE, WordPiece and unigram.

The same texts give the same vocabulary in every process, with any number of threads.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_data.errors import DataError
from megatron_data.plural import plural
from megatron_data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_data.tokenizers.unigram_training import unigram_pieces
from megatron_data.tokenizers.wordpiece import (
    CONTINUATION_PREFIX,
    SPECIAL_TOKENS,
    UNKNOWN,
    wordpiece_pipeline,
)
from megatron_data.tokenizers.words import as_texts, count_words

END_OF_TEXT = "<|endoftext|>"
_BYTES = 256
_CODES = 0x10000  # the first of a million code points without surrogates and white space
_NO_TEXT = "no text to train a tokenizer on"


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    *,
    special_tokens: Sequence[str] = (END_OF_TEXT,),
    min_frequency: int = 2,
    progress: bool = False,
) -> HuggingFaceTokenizer:
    """Trains a byte-level BPE tokenizer as in GPT-2, which encodes any text without loss.

    Special tokens get the first ids, in the given order; the first one ends documents. The
    vocabulary is smaller than `vocab_size` if the texts have too few distinct pairs.

    Args:
        texts: Training texts, such as `read_texts(["corpus.jsonl"])`.
        vocab_size: Largest size of the vocabulary, including special tokens and the 256 bytes.
        special_tokens: Special tokens, at least one.
        min_frequency: Smallest number of occurrences of a pair to be merged.
        progress: Whether to show the progress bar of the `tokenizers` library.

    Raises:
        DataError: The vocabulary is too small for the bytes, or there is no special token or text.
    """
    _check_bytes(vocab_size, special_tokens)
    tokenizer = _on_bytes(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=progress,
    )
    seen = 0

    def counted() -> Iterable[str]:
        nonlocal seen
        for text in texts:
            seen += len(text)
            yield text

    tokenizer.train_from_iterator(counted(), trainer=trainer)
    if not seen:
        raise DataError(_NO_TEXT)
    return _with_end(tokenizer, special_tokens)


def train_wordpiece(
    texts: Iterable[str],
    vocab_size: int,
    *,
    lower_case: bool = True,
    min_frequency: int = 2,
    progress: bool = False,
) -> HuggingFaceTokenizer:
    """Trains a WordPiece tokenizer as in BERT; [SEP] ends documents.

    Args:
        texts: Training texts, such as `read_texts(["corpus.jsonl"])`.
        vocab_size: Largest size of the vocabulary, including BERT's five special tokens and every
            character.
        lower_case: Whether to lower-case text and strip accents.
        min_frequency: Smallest number of occurrences of a pair to be merged.
        progress: Whether to show the progress bar of the `tokenizers` library.

    Raises:
        DataError: The vocabulary is too small for the special tokens, or there is no text.
    """
    if vocab_size <= len(SPECIAL_TOKENS):
        raise DataError(
            f"a vocabulary of {vocab_size} cannot hold {len(SPECIAL_TOKENS)} special tokens"
        )
    words = wordpiece_pipeline(models.WordPiece(unk_token=UNKNOWN), lower_case)
    counts = count_words(texts, words)
    _require_text(counts)
    pieces = _word_pieces(counts, vocab_size, min_frequency, progress)
    numbers = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = wordpiece_pipeline(models.WordPiece(numbers, unk_token=UNKNOWN), lower_case)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    roles = {"eod": "[SEP]", "eos": "[SEP]", "bos": "[CLS]", "pad": "[PAD]"}
    return HuggingFaceTokenizer(tokenizer.to_str(pretty=True), roles)


def train_unigram(
    texts: Iterable[str],
    vocab_size: int,
    *,
    special_tokens: Sequence[str] = (END_OF_TEXT,),
    progress: bool = False,
) -> HuggingFaceTokenizer:
    """Trains a byte-level unigram tokenizer (Kudo, 2018), which encodes any text without loss.

    Special tokens get the first ids, in the given order; the first one ends documents.

    Args:
        texts: Training texts, such as `read_texts(["corpus.jsonl"])`.
        vocab_size: Largest size of the vocabulary, including special tokens and the 256 bytes.
        special_tokens: Special tokens, at least one.
        progress: Whether to show the log of sentencepiece, which trains the pieces.

    Raises:
        DataError: The vocabulary is too small for the bytes, there is no special token or text, or
            sentencepiece is not installed.
    """
    _check_bytes(vocab_size, special_tokens)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    counts = count_words(texts, _on_bytes(models.Unigram()))
    _require_text(counts)
    pieces = unigram_pieces(counts, alphabet, vocab_size - len(special_tokens), progress)
    tokenizer = _on_bytes(models.Unigram([*((name, 0.0) for name in special_tokens), *pieces]))
    tokenizer.add_special_tokens(list(special_tokens))
    return _with_end(tokenizer, special_tokens)


def _word_pieces(
    counts: Sequence[tuple[str, int]], vocab_size: int, min_frequency: int, progress: bool
) -> list[str]:
    """Returns the word pieces in the order of their ids.

    The trainer for word pieces of the `tokenizers` library (0.23.3) numbers the characters that
    continue a word in the random order of a hash table, and ties between pairs follow the numbers.
    Its trainer for BPE sorts the alphabet. It computes the same, with characters of their own for
    those that continue a word.
    """
    characters = sorted(set().union(*(word for word, _ in counts)))
    start = {each: chr(_CODES + at) for at, each in enumerate(characters)}
    inside = {each: chr(_CODES + len(start) + at) for at, each in enumerate(characters)}
    back = {code: each for table in (start, inside) for each, code in table.items()}
    coded = [(start[w[0]] + "".join(inside[each] for each in w[1:]), n) for w, n in counts]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.CharDelimiterSplit(" ")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=list(start.values()),
        show_progress=progress,
    )
    trained.train_from_iterator(as_texts(coded), trainer=trainer)
    inner = set(inside.values())

    def spelling(piece: str) -> str:
        if piece in SPECIAL_TOKENS:
            return piece
        text = "".join(back[code] for code in piece)
        return CONTINUATION_PREFIX + text if piece[0] in inner else text

    numbers = trained.get_vocab()
    return [spelling(piece) for piece in sorted(numbers, key=numbers.__getitem__)]


def _check_bytes(vocab_size: int, special_tokens: Sequence[str]) -> None:
    """Raises DataError if a byte-level vocabulary is too small."""
    if not special_tokens:
        raise DataError("give at least one special token; the first one ends documents")
    smallest = _BYTES + len(special_tokens)
    if vocab_size < smallest:
        raise DataError(
            f"a byte-level vocabulary of {vocab_size} is too small for {_BYTES} bytes and "
            f"{plural(len(special_tokens), 'special token')}; use at least {smallest}"
        )


def _on_bytes(model: Any) -> Tokenizer:
    """Returns a tokenizer that splits texts like GPT-2 and spells words in bytes."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _with_end(tokenizer: Tokenizer, special_tokens: Sequence[str]) -> HuggingFaceTokenizer:
    end = special_tokens[0]
    return HuggingFaceTokenizer(tokenizer.to_str(pretty=True), {"eod": end, "eos": end})


def _require_text(counts: Sequence[Any]) -> None:
    if not counts:
        raise DataError(_NO_TEXT)
