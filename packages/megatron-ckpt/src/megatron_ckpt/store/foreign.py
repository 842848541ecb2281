"""What is given in place of a checkpoint, and what can be done with it."""

from pathlib import Path


def describe_foreign_checkpoint(path: str | Path) -> str | None:
    """Says what another program's checkpoint at ``path`` is; None where it looks like none.

    The answer goes on where a message has named ``path``: "is a Hugging Face folder; ...".
    A folder that has a complete checkpoint is not to be asked about: other files may lie beside it.
    """
    path = Path(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return "is a GGUF file; import it with megatron-ckpt convert --from-hf"
        return "is a file; give a folder of checkpoints"
    if (path / "config.json").is_file():
        return "is a Hugging Face folder; import it with megatron-ckpt convert --from-hf"
    for folder in (path, *sorted(path.glob("iter_*")), path / "release"):
        if (folder / "common.pt").exists() or any(folder.glob("mp_rank_*")):
            return "holds checkpoints of Megatron-LM, which cannot be read yet"
    return None
