"""The settings in the metadata of a GGUF file, as fields of ``config.json``."""

import reprlib
from collections.abc import Collection
from typing import Any

from megatron_ckpt.errors import CheckpointError
from megatron_ckpt.formats.gguf_file import GGUFFile

#: Metadata -> ``config.json``.
_NUMBERS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
#: Metadata that is read below or does not affect the computation of the model.
_OTHERS = {
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "vocab_size",
    "tensor_data_layout",
}
_TOKENS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "padding_token_id",
}
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"


class Settings:
    """The settings that decoders of several architectures have in common.

    Args:
        file: The file.
        prefix: The start of the keys of its architecture, with the point.
    """

    def __init__(self, file: GGUFFile, prefix: str) -> None:
        self._file, self._prefix = file, prefix

    def number(self, key: str, default: Any = None) -> Any:
        """Returns a number; a float has the shortest decimal that gives the stored float32.

        Raises:
            CheckpointError: The value is not a number, or is missing and has no default.
        """
        name = self._prefix + key
        value = self._file.require(name) if default is None else self._file.get(name, default)
        if isinstance(value, float):
            import numpy as np

            return float(str(np.float32(value)))  # stored as float32: 1e-05, not 9.99999974e-06
        if not isinstance(value, int):
            raise CheckpointError(f"{self._file.path}: {name} is {value!r}, not a number")
        return value

    def refuse_unknown(self, known: Collection[str] = ()) -> None:
        """Refuses keys of the architecture that neither this class nor ``known`` has.

        Raises:
            CheckpointError: Names all keys whose value is not 0 or empty.
        """
        refused = []
        for key in self._file.keys():  # noqa: SIM118 - the file is not a mapping
            setting = key.removeprefix(self._prefix)
            if setting == key or setting in _NUMBERS or setting in _OTHERS or setting in known:
                continue
            value = self._file.get(key)
            if value:  # dense models have expert_count and similar keys with the value 0
                refused.append(f"{key} is {reprlib.repr(value)}")
        if refused:
            raise CheckpointError(
                f"{self._file.path}: {' and '.join(refused)}, which is not supported for GGUF "
                "files; import the safetensors of the model"
            )

    def shape(self) -> dict[str, Any]:
        """Returns the sizes, the epsilon of the norms and whether the embeddings are tied.

        Raises:
            CheckpointError: Keys, values and rotation differ in their channels, or the file has no
                embeddings.
        """
        file = self._file
        config = {theirs: self.number(ours) for ours, theirs in _NUMBERS.items()}
        heads = config["num_attention_heads"]
        config["num_key_value_heads"] = self.number("attention.head_count_kv", heads)
        head_dim = self.number("attention.key_length", config["hidden_size"] // heads)
        for key in ("rope.dimension_count", "attention.value_length"):
            if (found := self.number(key, head_dim)) != head_dim:
                raise CheckpointError(
                    f"{file.path}: {self._prefix}{key} is {found}, but heads have {head_dim} "
                    "channels; it must be equal"
                )
        if _EMBEDDING not in file.tensor_names:
            raise CheckpointError(f"{file.path} has no tensor {_EMBEDDING!r}: it is not a model")
        return config | {
            "head_dim": head_dim,
            "vocab_size": self.number("vocab_size", file.meta(_EMBEDDING).shape[0]),
            "tie_word_embeddings": _OUTPUT not in file.tensor_names,
        }

    def rope_scaling(self) -> dict[str, Any]:
        """Returns ``rope_scaling`` by a kind and a factor, or nothing."""
        kind = self._file.get(f"{self._prefix}rope.scaling.type", "none")
        if kind == "none":
            return {}
        return {"rope_scaling": {"rope_type": kind, "factor": self.number("rope.scaling.factor")}}

    def tokens(self) -> dict[str, Any]:
        """Returns the special tokens of the model."""
        found = {ours: self._file.get(f"tokenizer.ggml.{key}") for ours, key in _TOKENS.items()}
        return {ours: token for ours, token in found.items() if token is not None}
