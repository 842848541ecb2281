"""Names of parameters in megatron-core's GPT models with layers of its local modules."""

from typing import Final

_LAYER: Final = {
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attention.linear_qkv",
    "attention.q": "self_attention.linear_q_proj",
    "attention.q_down": "self_attention.linear_q_down_proj",
    "attention.q_norm": "self_attention.q_layernorm",
    "attention.q_up": "self_attention.linear_q_up_proj",
    "attention.kv_down": "self_attention.linear_kv_down_proj",
    "attention.kv_norm": "self_attention.kv_layernorm",
    "attention.kv_up": "self_attention.linear_kv_up_proj",
    "attention.out": "self_attention.linear_proj",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp.up": "mlp.linear_fc1",
    "mlp.down": "mlp.linear_fc2",
}
_ENDS: Final = {
    "embedding.word": "embedding.word_embeddings",
    "embedding.position": "embedding.position_embeddings",
    "final_norm": "decoder.final_layernorm",
    "output": "output_layer",
}


def name_in_megatron(name: str) -> str:
    """Returns megatron-core's name of one of our parameters.

    Raises:
        KeyError: The parameter has no counterpart.
    """
    module, _, kind = name.rpartition(".")
    if module in _ENDS:
        return f"{_ENDS[module]}.{kind}"
    part, number, inner = module.split(".", 2)
    if part == "layers":
        return f"decoder.layers.{number}.{_LAYER[inner]}.{kind}"
    if inner.startswith("layer."):
        inner = f"transformer_layer.{_LAYER[inner.removeprefix('layer.')]}"
    inner = inner.replace("final_norm", "final_layernorm")
    return f"mtp.layers.{number}.{inner}.{kind}"
