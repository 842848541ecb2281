"""Settings that a run takes from a checkpoint: of the model, and the tokenizer that lies in it.

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
"""How the origin of a value that a checkpoint gives begins."""

TOKENIZER_FOLDER: Final = "tokenizer"
"""Folder of a checkpoint that holds its tokenizer."""

TOKENIZER_SETTINGS: Final = ("tokenizer_type", "tokenizer_model", "vocab_file")
"""Settings of the section ``data``, any of which says that there is a tokenizer."""


def model_of(checkpoint: "Checkpoint", flag: str) -> "ModelConfig":
    """Returns the model configuration that a checkpoint records.

    Args:
        checkpoint: complete.
        flag: that asks for it, for messages.

    Raises:
        TrainError: it records none, or one that is not known here.
    """
    if checkpoint.model is None:
        raise TrainError(f"{flag}: {checkpoint.path} does not say what model it holds")
    try:
        return config_of(checkpoint.model)
    except ConfigError as error:
        raise TrainError(f"{flag}: {checkpoint.path}: {error}") from None


def with_model_of(values: Values, checkpoint: "Checkpoint", model: "ModelConfig") -> Values:
    """Returns ``values`` with every setting of the model that is not given taken from ``model``."""
    for option in options_of(type(model), "model"):
        value = getattr(model, option.name)
        values = values.with_derived(option.key, value, f"{CHECKPOINT_ORIGIN}{checkpoint.path}")
    return values


def with_tokenizer_of(values: Values, checkpoint: "Checkpoint") -> Values:
    """Returns ``values`` with the tokenizer in a checkpoint, unless one is given or none is there.

    Raises:
        CheckpointError: a file of the tokenizer is damaged.
    """
    held = any(name.startswith(f"{TOKENIZER_FOLDER}/") for name in checkpoint.manifest.files)
    if any(f"data.{name}" in values.given for name in TOKENIZER_SETTINGS) or not held:
        return values
    folder = checkpoint.verified_folder(TOKENIZER_FOLDER)
    return values.with_derived(
        "data.tokenizer_model", str(folder), f"{CHECKPOINT_ORIGIN}{checkpoint.path}"
    )
