"""The tokenizer of a run, from the files that its configuration names; nothing here needs torch."""

from megatron_data import Tokenizer, build_tokenizer

from megatron_train.config.data import DataConfig
from megatron_train.errors import TrainError


def open_tokenizer(data: DataConfig, vocab_size: int | None = None) -> Tokenizer | None:
    """Returns the tokenizer that the section ``data`` names, None where it names none.

    Args:
        data: the section.
        vocab_size: tokens of the model, which is all that the Null kinds are made of, and to
            which the vocabulary of a TikTokenizer is cut.

    Raises:
        DataError: a file that is missing or no tokenizer.
        TrainError: no vocabulary size.
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
    """Opens the tokenizer of a run once, though its configuration and its ranks' data need it."""

    def __init__(self) -> None:
        self._opened: list[tuple[DataConfig, int | None, Tokenizer | None]] = []

    def open(self, data: DataConfig, vocab_size: int | None = None) -> Tokenizer | None:
        """Returns the tokenizer as `open_tokenizer` does, the same for equal settings.

        Without ``vocab_size`` it is also that of a model with as many tokens as it has.
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
