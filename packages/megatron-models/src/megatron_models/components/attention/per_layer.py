"""Options of attention that only some layers have. Importing this module does not import torch."""

from typing import Any

from megatron_models.components.attention.config import TEMPERATURE_FLOOR, AttentionConfig


def attention_changes(config: AttentionConfig, number: int) -> dict[str, Any]:
    """Returns the fields of a layer's attention that differ from those of the model."""
    changes: dict[str, Any] = {"window_attn_skip_freq": "", **_rotation_changes(config, number)}
    if not config.windowed_layers[number]:
        changes |= {"sliding_window": 0, "attention_chunk_size": 0}
    return changes


def _rotation_changes(config: AttentionConfig, number: int) -> dict[str, Any]:
    """Returns the fields of a layer with or without rotary positions that differ from the model."""
    changes: dict[str, Any] = {"rotary_base_local": 0.0}
    if config.unrotated_layers[number]:
        return changes | {
            "position_embedding_type": "none",
            "mrope_section": (),
            "mrope_interleaved": False,
            "no_rope_freq": "0",
            "qk_l2_norm": False,
        }
    if config.position_embedding_type == "rope":
        changes |= {"attn_temperature_scale": 0.0, "attn_temperature_floor": TEMPERATURE_FLOOR}
    if config.rotary_base_local and config.windowed_layers[number]:
        changes |= {"rotary_base": config.rotary_base_local, "rope_scaling_type": "none"}
    return changes
