"""Weight-decay groups equal those of megatron-core for parameters of every kind."""

from typing import Any

import pytest
import torch
from megatron_optim import OptimizerConfig

core = pytest.importorskip("megatron.core.optimizer")

SHAPES = {
    "embedding.word.weight": (12, 4),
    "layers.0.attention.qkv.weight": (12, 4),
    "layers.0.attention.qkv.bias": (12,),
    "layers.0.attention.q_norm.weight": (4,),
    "layers.0.attention.k_norm.weight": (4,),
    "layers.0.mlp_norm.weight": (4,),
    "output.weight": (12, 4),
}


@pytest.mark.parametrize("with_norms", [False, True])
def test_factors_of_weight_decay_equal_those_of_megatron(with_norms: bool) -> None:
    given: dict[str, Any] = {"lr": 1e-3, "min_lr": 0.0, "weight_decay": 0.1}
    settings = core.AdamOptimizerConfig(**given, apply_wd_to_qk_layernorm=with_norms)
    overrides = core.get_standard_config_overrides(settings)
    rules = OptimizerConfig(**given, apply_wd_to_qk_layernorm=with_norms).name_rules
    for name, shape in SHAPES.items():
        their_name = name.replace("q_norm", "q_layernorm").replace("k_norm", "k_layernorm")
        parameter = torch.nn.Parameter(torch.zeros(shape))
        found = [o for key, o in overrides.items() if key.matches(parameter, their_name)]
        theirs = found[0].get("wd_mult", 1.0) if found else 1.0
        assert rules.decay_factor(name, decays=len(shape) > 1) == theirs, name
