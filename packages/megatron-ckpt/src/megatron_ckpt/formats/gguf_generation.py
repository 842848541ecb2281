"""The settings of generation in the metadata of a GGUF file, as a ``generation_config.json``.

llama.cpp ends a text at the tokens of end of text, of turn and of message in the metadata, and at
tokens with certain spellings (`_ENDS`), which older files do not list (``llama-vocab.cpp``,
``special_eog_ids``). Keys ``general.sampling`` have the publisher's settings of sampling.
"""

from typing import Any

from megatron_ckpt.formats.gguf_file import GGUFFile

_KEY, _SAMPLING = "tokenizer.ggml.", "general.sampling."
#: Spellings that end a text in llama.cpp, as far as models of the supported architectures use them.
_ENDS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|end|>",
        "<end_of_turn>",
        "<eos>",
        "</s>",
        "<EOT>",
        "_<EOT>",
        "<end_of_utterance>",
    }
)
#: Metadata -> field of ``generation_config.json``.
_FIELDS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """Returns the fields of ``generation_config.json`` that a file has values for.

    Raises:
        CheckpointError: The list of tokens has another type.
    """
    config: dict[str, Any] = {}
    for ours, theirs in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if (value := file.get(_KEY + theirs)) is not None:
            config[ours] = value
    if ends := _ends(file):
        config["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    sampling = {ours: file.get(_SAMPLING + theirs) for theirs, ours in _FIELDS.items()}
    sampling = {ours: _decimal(value) for ours, value in sampling.items() if value is not None}
    if sampling:
        # Without a limit, transformers would draw from the 50 likeliest tokens.
        config |= {"do_sample": True, "top_k": 0, **sampling}
    return config


def _ends(file: GGUFFile) -> list[int]:
    """Returns the tokens that end a text, the end of text first."""
    named = [file.get(f"{_KEY}{role}_token_id") for role in ("eos", "eot", "eom")]
    tokens = file.listed(f"{_KEY}tokens", str) if file.get(f"{_KEY}tokens") is not None else []
    spelled = [number for number, token in enumerate(tokens) if token in _ENDS]
    return list(dict.fromkeys(each for each in (*named, *spelled) if each is not None))


def _decimal(value: Any) -> Any:
    """Returns a number as the shortest decimal that gives the stored float32: 0.9."""
    if not isinstance(value, float):
        return value
    import numpy as np

    return float(str(np.float32(value)))
