"""Published configurations, and small models that keep what is particular about each.

The files in `FOLDER` hold the keys and values of published ``config.json`` files by family, and
where each was seen. `shrunken` replaces sizes alone: every other field, and every spelling, stays.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from families.case import FamilyCase, cases

FOLDER = Path(__file__).parents[2] / "integration_tests" / "parity" / "published"

HEAD, VOCABULARY, EXPERTS, WINDOW = 16, 150, 8, 8
POSITIONS = 66  # RoBERTa has two more than tokens

#: New values of sizes, if a configuration has more.
SIZES: Mapping[str, int] = {
    "vocab_size": VOCABULARY,
    "n_ctx": 64,
    "n_positions": 64,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": HEAD,
    "qk_rope_head_dim": 8,
    "v_head_dim": HEAD,
    "index_head_dim": HEAD,
    "index_n_heads": 16,  # many, so that no two keys have a score of exactly 0
    "index_topk": 8,
    "d_kv": HEAD,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "state_size": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "mamba_num_heads": 8,
    "n_groups": 2,
    "num_nextn_predict_layers": 0,
}
WIDTHS = ("hidden_size", "n_embd", "d_model")
HEADS = ("num_attention_heads", "n_head", "num_heads")
GROUPS = ("num_key_value_heads", "num_kv_heads")
INNER = (
    "intermediate_size",
    "n_inner",
    "d_ff",
    "ffn_hidden_size",
    "intermediate_size_mlp",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_expert_intermediate_size",
)
EXPERT_COUNTS = ("num_local_experts", "n_routed_experts", "num_experts")
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")


@dataclass(frozen=True)
class Published:
    """A published configuration.

    Attributes:
        family: Name of the family.
        model: Name of the model on the hub.
        source: Repository and path of the public copy.
        note: How the values differ from those of the copy. Defaults to none.
        config: Content of the ``config.json``.
    """

    family: str
    model: str
    source: str
    note: str
    config: Mapping[str, Any]

    @property
    def case(self) -> FamilyCase:
        """The case of its family with the small configuration and the class that it names."""
        case, config = cases()[self.family], self.shrunken
        settings = {name: value for name, value in config.items() if name != "architectures"}
        (model_class,) = config["architectures"]
        return replace(case, settings=settings, model_class=model_class)

    @property
    def shrunken(self) -> dict[str, Any]:
        """The configuration with small sizes, without the format of quantized weights."""
        import transformers

        small = shrunken(self.config)
        default = getattr(transformers, cases()[self.family].config_class)().pad_token_id
        if "pad_token_id" not in small and default is not None and default >= VOCABULARY:
            small["pad_token_id"] = None  # their default is outside a small vocabulary
        small.setdefault("vocab_size", VOCABULARY)
        return small


@cache
def published() -> tuple[Published, ...]:
    """Returns the published configurations of all families, in their order."""
    return tuple(_read())


def _read() -> Iterator[Published]:
    for path in sorted(FOLDER.glob("*.json")):
        for row in json.loads(path.read_text()):
            yield Published(path.stem, **{"note": "", **row})


def shrunken(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration with small sizes that keep ratios, divisibility and patterns."""
    small = dict(config)
    small.pop("quantization_config", None)  # weights are drawn in float32
    heads, groups = _first(config, HEADS), _first(config, GROUPS)
    few, share = _shared(config[heads], config[groups] if groups and config[groups] else None)
    width = _first(config, WIDTHS)
    channels = config.get("head_dim") or config.get("d_kv")
    square = channels is None or channels * config[heads] == config[width]
    small[heads], small[width] = few, few * HEAD + (0 if square else HEAD)
    if config.get("model_type") == "mamba2":  # heads share the expanded width
        small[width] = few * HEAD // config["expand"]
    if groups and config[groups]:
        small[groups] = few // share
    if config.get("head_dim"):
        small["head_dim"] = HEAD
    for name in INNER:
        if config.get(name):
            small[name] = max(8, round(config[name] * small[width] / config[width] / 4) * 4)
    for name, size in SIZES.items():
        if isinstance(config.get(name), int):
            small[name] = min(config[name], size)
    if "linear_num_value_heads" in config:
        ratio = config["linear_num_value_heads"] // config["linear_num_key_heads"]
        small["linear_num_value_heads"] = ratio * small["linear_num_key_heads"]
    _shrink_experts(config, small)
    _shrink_layers(config, small)
    _shrink_positions(config, small)
    return small


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> str:
    return next((name for name in names if name in config), "")


def _shared(heads: int, groups: int | None) -> tuple[int, int]:
    """Returns small numbers of heads and of heads that share a group; odd numbers stay odd."""
    groups = groups or heads
    share = heads // groups
    if share > 8:
        share = 5 if share % 2 else 8
    few = min(groups, 3 if groups % 2 else 2 if share > 1 else 4)
    return few * share, share


def _shrink_experts(config: Mapping[str, Any], small: dict[str, Any]) -> None:
    name = _first(config, EXPERT_COUNTS)
    if not name:
        return
    small[name] = min(config[name], max(EXPERTS, 2 * (config.get("n_group") or 1)))
    for chosen in ("num_experts_per_tok", "experts_per_token"):
        if chosen in config:
            small[chosen] = min(config[chosen], 4)


def _shrink_layers(config: Mapping[str, Any], small: dict[str, Any]) -> None:
    """Keeps the first layers, as many as show each kind of layer and one more period."""
    dense = config.get("first_k_dense_replace") or 0
    periods = ("sliding_window_pattern", "full_attention_interval", "no_rope_layer_interval")
    period = max((config.get(name) or 0 for name in periods), default=0)
    count = max(2, dense + 1, period + 1 if period else 0)
    kinds = config.get("hybrid_override_pattern") or config.get("layer_types")
    if kinds:
        count = max(count, 1 + max(kinds.index(kind) for kind in set(kinds)))
    elif config.get("model_type") in ("gemma3_text", "olmo3", "llama4_text"):
        count = 7  # a default pattern of their classes
    for name in DEPTHS:
        if name in config:
            small[name] = min(config[name], count)
    for name in ("hybrid_override_pattern", "layer_types", "layers_block_type", "no_rope_layers"):
        if config.get(name):
            small[name] = config[name][:count]


def _shrink_positions(config: Mapping[str, Any], small: dict[str, Any]) -> None:
    most = config.get("max_position_embeddings")
    if config.get("model_type") in ("bert", "roberta"):  # a table of learned positions
        small["max_position_embeddings"] = POSITIONS
    elif most is not None and most > 2**17:
        small["max_position_embeddings"] = 2**17  # tables of angles are as long
    for name in ("sliding_window", "attention_chunk_size"):
        window = config.get(name)
        if window is not None and (most is None or window < most):
            small[name] = WINDOW
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(config.get(name), int):
            small[name] = min(config[name], VOCABULARY - 1)
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and "long_factor" in scaling:
        pairs = int(HEAD * (config.get("partial_rotary_factor") or 1)) // 2
        lists = {name: scaling[name][:pairs] for name in ("long_factor", "short_factor")}
        small["rope_scaling"] = {**scaling, **lists}
