"""Opening the source of an import, in any supported format."""

from pathlib import Path

from megatron_ckpt.errors import CheckpointError
from megatron_ckpt.formats.source import ModelSource


def open_source(path: str | Path) -> ModelSource:
    """Opens a folder in the format of Hugging Face's libraries, or a GGUF file.

    Raises:
        CheckpointError: The path is neither, or its configuration cannot be read.
    """
    path = Path(path)
    if path.is_file():
        from megatron_ckpt.formats.gguf import is_gguf, open_gguf

        if is_gguf(path):
            return open_gguf(path)
        raise CheckpointError(
            f"{path} is not a GGUF file; use a GGUF file or the folder of a Hugging Face model"
        )
    from megatron_ckpt.formats.huggingface import open_folder

    return open_folder(path)
