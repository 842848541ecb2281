"""A checkpoint that is computed from the weights of another one; it has no optimizer state."""

from collections.abc import Mapping
from pathlib import Path

from megatron_ckpt import Checkpoint, CheckpointStore, ModelRecord, View
from torch import Tensor

from megatron_train.config.from_checkpoint import TOKENIZER_FOLDER
from megatron_train.errors import TrainError


def empty_store(save: str | Path) -> CheckpointStore:
    """Returns the store of a folder without checkpoints.

    Raises:
        TrainError: The folder has a checkpoint.
    """
    store = CheckpointStore(Path(save))
    if (other := store.latest_checkpoint()) is not None:
        raise TrainError(
            f"--save {save} already has a checkpoint ({other.path}); give a folder without "
            "checkpoints"
        )
    return store


def read_weights(source: Checkpoint) -> dict[str, Tensor]:
    """Returns all tensors of the model in a checkpoint, by name."""
    return {
        name: source.read_tensor(name) for name, r in source.tensors.items() if r.group == "model"
    }


def save_derived(
    store: CheckpointStore, source: Checkpoint, weights: Mapping[str, Tensor], model: ModelRecord
) -> Path:
    """Saves weights with the iteration and the tokenizer of ``source``; returns the checkpoint."""
    files: dict[str, bytes | Path] = {}
    if any(name.startswith(f"{TOKENIZER_FOLDER}/") for name in source.manifest.files):
        files[TOKENIZER_FOLDER] = source.verified_folder(TOKENIZER_FOLDER)
    state = {name: [View.whole(weight)] for name, weight in weights.items()}
    return store.save(source.iteration, state, model=model, files=files)
