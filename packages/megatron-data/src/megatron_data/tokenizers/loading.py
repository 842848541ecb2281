"""Opening a tokenizer from a local file or folder."""

import os
from collections.abc import Mapping
from pathlib import Path

from ..errors import DataError
from ..files import read_json
from .huggingface import HuggingFaceTokenizer
from .plain import PLAIN_FILE, ByteTokenizer, NullTokenizer
from .protocol import Tokenizer


def load_tokenizer(
    path: str | os.PathLike[str], special_tokens: Mapping[str, str] | None = None
) -> Tokenizer:
    """Open a `tokenizer.json`, a folder that holds one, or a folder that `save` wrote.

    Nothing is downloaded: a name of a model hub is not a path.

    Args:
        path: file or folder.
        special_tokens: overrides which token plays "eod", "bos", "eos" or "pad".

    Raises:
        DataError: nothing there, or nothing that is a tokenizer.
    """
    plain = Path(path) / PLAIN_FILE
    if not plain.is_file():
        return HuggingFaceTokenizer.load(path, special_tokens)
    content = read_json(plain)
    match content:
        case {"type": "ByteTokenizer"}:
            return ByteTokenizer()
        case {"type": "NullTokenizer", "vocab_size": int(vocab_size)}:
            return NullTokenizer(vocab_size)
    raise DataError(f"{plain} describes no tokenizer of this package: {content}")
