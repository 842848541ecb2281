"""The tokenizer of a run, from the files that its configuration names; nothing here needs torch."""

from megatron_data import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    Tokenizer,
    gpt2_tokenizer,
    load_tokenizer,
)

from megatron_train.config.data import DataConfig
from megatron_train.errors import TrainError


def open_tokenizer(data: DataConfig, vocab_size: int | None = None) -> Tokenizer | None:
    """Return the tokenizer that the section ``data`` names, None where it names none.

    Args:
        data: the section.
        vocab_size: tokens of the model, which is all that a NullTokenizer is made of.

    Raises:
        DataError: a file that is missing or no tokenizer.
        TrainError: no vocabulary size.
    """
    model = data.tokenizer_model or ""
    match data.tokenizer:
        case None:
            return None
        case "GPT2BPETokenizer":
            return gpt2_tokenizer(data.vocab_file or "", data.merge_file or "")
        case "ByteTokenizer":
            return ByteTokenizer()
        case "NullTokenizer":
            if vocab_size is None:
                raise TrainError("--tokenizer-type NullTokenizer needs --vocab-size")
            return NullTokenizer(vocab_size - 1)
        case "HuggingFaceTokenizer":
            if data.tokenizer_type is not None:
                return HuggingFaceTokenizer.load(model)
            return load_tokenizer(model)
