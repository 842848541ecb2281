"""Settings that a run takes from a checkpoint: those of the model and its tokenizer.

Importing this module imports neither torch nor the checkpoint package.
"""

from typing import TYPE_CHECKING, Final

from megatron_models import ConfigError, config_of

from megatron_train.config.options import options_of
from megatron_train.config.values import Values
from megatron_train.errors import TrainError

if TYPE_CHECKING:
    from megatron_ckpt import Checkpoint
    from megatron_models import ModelConfig

CHECKPOINT_ORIGIN: Final = "the checkpoint "
"""Prefix of the origin of values that come from a checkpoint."""

TOKENIZER_FOLDER: Final = "tokenizer"
"""Folder of the tokenizer in a checkpoint."""

TOKENIZER_SETTINGS: Final = ("tokenizer_type", "tokenizer_model", "vocab_file")
"""Settings of the section ``data`` that each select a tokenizer."""


def model_of(checkpoint: "Checkpoint", flag: str) -> "ModelConfig":
    """Returns the model configuration that a checkpoint records.

    Args:
        checkpoint: A complete checkpoint.
        flag: Flag that requests the model; errors name it.

    Raises:
        TrainError: The checkpoint records no model, or an unknown kind of model.
    """
    if checkpoint.model is None:
        raise TrainError(
            f"{flag}: {checkpoint.path} has no record of its model; give another checkpoint"
        )
    try:
        return config_of(checkpoint.model)
    except ConfigError as error:
        raise TrainError(f"{flag}: {checkpoint.path}: {error}") from None


def with_model_of(values: Values, checkpoint: "Checkpoint", model: "ModelConfig") -> Values:
    """Returns ``values`` with the missing settings of the model taken from ``model``."""
    for option in options_of(type(model), "model"):
        value = getattr(model, option.name)
        values = values.with_derived(option.key, value, f"{CHECKPOINT_ORIGIN}{checkpoint.path}")
    return values


def with_tokenizer_of(values: Values, checkpoint: "Checkpoint") -> Values:
    """Returns ``values`` with the tokenizer in a checkpoint, if there is one and none is given.

    Raises:
        CheckpointError: A file of the tokenizer is damaged.
    """
    held = any(name.startswith(f"{TOKENIZER_FOLDER}/") for name in checkpoint.manifest.files)
    if any(f"data.{name}" in values.given for name in TOKENIZER_SETTINGS) or not held:
        return values
    folder = checkpoint.verified_folder(TOKENIZER_FOLDER)
    return values.with_derived(
        "data.tokenizer_model", str(folder), f"{CHECKPOINT_ORIGIN}{checkpoint.path}"
    )
