"""Detection of checkpoints of other programs, with advice on how to use them."""

from pathlib import Path


def describe_foreign_checkpoint(path: str | Path) -> str | None:
    """Describes the checkpoint of another program at ``path``; returns None if there is none.

    The description continues a sentence that starts with ``path``: "is a Hugging Face folder; ...".
    Call it only for a folder without a complete checkpoint of this package, since other files may
    lie beside one.
    """
    path = Path(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return "is a GGUF file; import it with megatron-ckpt convert --from-hf"
        return "is a file; use a folder of checkpoints"
    if (path / "config.json").is_file():
        return "is a Hugging Face folder; import it with megatron-ckpt convert --from-hf"
    for folder in (path, *sorted(path.glob("iter_*")), path / "release"):
        if (folder / "common.pt").exists() or any(folder.glob("mp_rank_*")):
            return "holds checkpoints of Megatron-LM, which are not supported yet"
    return None


def is_importable(path: str | Path) -> bool:
    """Returns whether ``path`` is a GGUF file or a Hugging Face folder, not a checkpoint."""
    path = Path(path)
    if path.is_file():
        return path.suffix == ".gguf"
    return (path / "config.json").is_file() and not any(path.glob("iter_*"))
