"""The tokenizer of a run. Importing this module does not import torch."""

from megatron_data import Tokenizer, build_tokenizer

from megatron_train.config.data import DataConfig
from megatron_train.errors import TrainError


def open_tokenizer(data: DataConfig, vocab_size: int | None = None) -> Tokenizer | None:
    """Returns the tokenizer that the section ``data`` names; None if it names none.

    Args:
        data: The section.
        vocab_size: Vocabulary size of the model. The Null kinds need it, and the vocabulary of a
            TikTokenizer is truncated to it.

    Raises:
        DataError: A file is missing or is not a tokenizer.
        TrainError: The vocabulary size is missing.
    """
    if data.tokenizer is None:
        return None
    options = data.tokenizer_settings
    if data.tokenizer.startswith("Null"):
        if vocab_size is None:
            raise TrainError(f"--tokenizer-type {data.tokenizer} needs --vocab-size")
        options["vocab_size"] = vocab_size - 1
    elif data.tokenizer == "TikTokenizer":
        options["vocab_size"] = vocab_size
    return build_tokenizer(data.tokenizer_type, **options)


class TokenizerCache:
    """Opens each tokenizer of a run only once."""

    def __init__(self) -> None:
        self._opened: list[tuple[DataConfig, int | None, Tokenizer | None]] = []

    def open(self, data: DataConfig, vocab_size: int | None = None) -> Tokenizer | None:
        """Returns the result of `open_tokenizer`, which is cached for equal settings.

        A tokenizer that was opened without ``vocab_size`` is also returned for its own size.
        """
        wanted = data.tokenizer, data.tokenizer_settings
        for known, size, tokenizer in self._opened:
            if (known.tokenizer, known.tokenizer_settings) == wanted:
                own = None if tokenizer is None else tokenizer.vocab_size
                if vocab_size == size or (size is None and vocab_size == own):
                    return tokenizer
        found = open_tokenizer(data, vocab_size)
        self._opened.append((data, vocab_size, found))
        return found
