"""Trains vocabularies: byte-level BPE, WordPiece and unigram."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_data.errors import DataError
from megatron_data.plural import plural
from megatron_data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_data.tokenizers.wordpiece import (
    CONTINUATION_PREFIX,
    SPECIAL_TOKENS,
    UNKNOWN,
    wordpiece_pipeline,
)

END_OF_TEXT = "<|endoftext|>"
_BYTES = 256


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
    trainer = partial(trainers.BpeTrainer, min_frequency=min_frequency, show_progress=progress)
    return _train_on_bytes(models.BPE(), trainer, texts, vocab_size, special_tokens)


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
    tokenizer = wordpiece_pipeline(models.WordPiece(unk_token=UNKNOWN), lower_case)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(SPECIAL_TOKENS),
        continuing_subword_prefix=CONTINUATION_PREFIX,
        show_progress=progress,
    )
    _train(tokenizer, texts, trainer)
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
        progress: Whether to show the progress bar of the `tokenizers` library.

    Raises:
        DataError: The vocabulary is too small for the bytes, or there is no special token or text.
    """
    trainer = partial(trainers.UnigramTrainer, show_progress=progress)
    return _train_on_bytes(models.Unigram(), trainer, texts, vocab_size, special_tokens)


def _train_on_bytes(
    model: Any,
    trainer: Callable[..., Any],
    texts: Iterable[str],
    vocab_size: int,
    special_tokens: Sequence[str],
) -> HuggingFaceTokenizer:
    """Trains a byte-level model, with all 256 bytes in the vocabulary."""
    if not special_tokens:
        raise DataError("give at least one special token; the first one ends documents")
    smallest = _BYTES + len(special_tokens)
    if vocab_size < smallest:
        raise DataError(
            f"a byte-level vocabulary of {vocab_size} is too small for {_BYTES} bytes and "
            f"{plural(len(special_tokens), 'special token')}; use at least {smallest}"
        )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    prepared = trainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    _train(tokenizer, texts, prepared)
    end = special_tokens[0]
    return HuggingFaceTokenizer(tokenizer.to_str(pretty=True), {"eod": end, "eos": end})


def _train(tokenizer: Tokenizer, texts: Iterable[str], trainer: Any) -> None:
    seen = 0

    def counted() -> Iterable[str]:
        nonlocal seen
        for text in texts:
            seen += len(text)
            yield text

    tokenizer.train_from_iterator(counted(), trainer=trainer)
    if not seen:
        raise DataError("no text to train a tokenizer on")
