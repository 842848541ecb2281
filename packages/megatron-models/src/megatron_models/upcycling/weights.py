"""Makes a mixture of experts from a dense model: upcycling (Komatsuzaki et al. 2022).

Every expert is a copy of the feed-forward layer, and the router is random. With granularity ``G``
(He et al. 2024, section 3) the feed-forward width is cut into ``G`` slices. Expert ``j G + g``
holds slice ``g``, and experts ``j G .. j G + G - 1`` are a virtual group with equal router rows. A
token that selects an expert therefore selects its whole group, and all slices of the layer once.

The weights of a token's ``k`` experts sum to ``S``, so each group has ``w`` for every slice and the
groups ``G w`` together sum to ``S``. The second matrix is multiplied by ``G / S`` and its bias by
``1 / S``. The output is then that of the dense layer for every activation. (Megatron-LM divides
the factor between both matrices, which an activation such as SiLU does not preserve.)

``S`` is the scaling factor of the router where weights are normalized: with a softmax over the
selected experts, or scores divided by their sum. Otherwise it depends on the token; here it is that
of equal logits, and outputs are equal only as far as the router's logits are.
"""

import re
from collections.abc import Mapping
from typing import cast

import torch
from megatron_parallel import Mesh
from megatron_parallel.sharding import initialize
from torch import Tensor

from megatron_models.components.moe.config import MoEConfig
from megatron_models.models.model_config import ModelConfig
from megatron_models.upcycling.config import expert_weight_sum

_EXPERT = re.compile(r"(?P<layer>.+)\.experts\.(?P<which>up|down)\.(?P<kind>weight|bias)")


def upcycled_weights(
    dense: Mapping[str, Tensor], config: ModelConfig, granularity: int, seed: int
) -> dict[str, Tensor]:
    """Returns the weights of the upcycled model, by name.

    Args:
        dense: Weights of the dense model.
        config: Result of `upcycled_config`.
        granularity: As for `upcycled_config`.
        seed: Seed of the routers.
    """
    total, _ = expert_weight_sum(config)
    experts = cast(MoEConfig, config).num_experts
    found: dict[str, Tensor] = {}
    table = {name: spec.sharding for name, spec in config.parameters().items()} | config.state()
    dtype = max(dense.values(), key=Tensor.numel).dtype
    for name, sharding in table.items():
        if name in dense:
            found[name] = dense[name]
        elif match := _EXPERT.fullmatch(name):
            source = dense[f"{match['layer']}.{match['which']}.{match['kind']}"]
            scale = 1.0
            if match["which"] == "down":
                scale = (granularity if match["kind"] == "weight" else 1) / total
            cut = {"up.weight": -2, "up.bias": -1, "down.weight": -1}
            dim = cut.get(f"{match['which']}.{match['kind']}")
            scaled = (source.double() * scale).to(source.dtype)
            slices = (scaled,) * granularity if dim is None else scaled.chunk(granularity, dim)
            copies = experts // granularity
            found[name] = torch.stack(slices).repeat(copies, *(1,) * source.dim())
        else:
            drawn = torch.empty(sharding.shape, dtype=dtype)
            initialize(drawn, seed=seed, name=name, sharding=sharding, mesh=Mesh.single())
            rows = drawn[: experts // granularity]
            found[name] = rows.repeat_interleave(granularity, 0)
    return found
