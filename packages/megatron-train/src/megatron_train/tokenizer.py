"""The tokenizer of a run, from the files that its configuration names; nothing here needs torch."""

from megatron_data import Tokenizer, make_tokenizer

from megatron_train.config.data import DataConfig
from megatron_train.errors import TrainError


def open_tokenizer(data: DataConfig, vocab_size: int | None = None) -> Tokenizer | None:
    """Return the tokenizer that the section ``data`` names, None where it names none.

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
    return make_tokenizer(data.tokenizer_type, **options)
