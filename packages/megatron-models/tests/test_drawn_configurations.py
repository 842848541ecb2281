"""A drawn configuration is refused in one line when it is created, or its model trains."""

import dataclasses
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron_models.errors import ConfigError
from megatron_models.models.gpt.config import GPTConfig
from megatron_models.models.gpt.model import GPT
from megatron_models.placement import Placement
from megatron_parallel import Mesh
from refusals.cases.case import EXPERTS, GROUPS, LATENT, ROPE, SMALL, blocks

START = (
    {},
    ROPE,
    {"position_embedding_type": "mrope", "mrope_section": (1, 1, 1)},
    EXPERTS,
    GROUPS,
    LATENT,
    {**EXPERTS, "moe_router_score_function": "sigmoid"},
    {**ROPE, "sliding_window": 4},
    {"mtp_num_layers": 1},
)
TEXTS = {
    "heterogeneous_layers_config_encoded_json": [
        blocks(first)["heterogeneous_layers_config_encoded_json"]
        for first in (
            "{}",
            '{"attention": {"no_op": true}}',
            '{"mlp": {"kind": "moe"}}',
            '{"attention": {"num_attention_heads": 2, "num_query_groups": 1}}',
            '{"mlp": {"replace_with_linear": true}, "attention": {"replace_with_linear": true}}',
        )
    ],
    "layer_modules": ["", "mlp=megatron_models.components.linear.spec:LinearSpec"],
    "rope_scaling_short_factors": ["", "1,2,3", "2,2"],
    "rope_scaling_long_factors": ["", "1,2,3", "2,2"],
}
PATTERNS = ["0", "1", "2", "[1,0]*2", "[0]*4", "[0,1]*2", "{x}", ""]
NUMBERS = [-1.0, 0.0, 1e-3, 0.5, 1.0, 2.0, 1e6, float("inf"), float("nan")]


def values(entry: "dataclasses.Field[Any]") -> st.SearchStrategy[Any]:
    """Returns valid and invalid values of a field."""
    if get_origin(entry.type) is Literal:
        return st.sampled_from([*get_args(entry.type), "other"])
    if entry.type is bool:
        return st.booleans()
    if entry.type is int:
        return st.integers(-1, 9)
    if entry.type == tuple[int, ...]:
        return st.lists(st.integers(-1, 4), max_size=4)
    return st.sampled_from(NUMBERS if entry.type is float else TEXTS.get(entry.name, PATTERNS))


FIELDS = {entry.name: values(entry) for entry in dataclasses.fields(GPTConfig)}


@st.composite
def drawn(draw: st.DrawFn) -> dict[str, Any]:
    """Returns fields of a small model, of which a few are drawn."""
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=4, unique=True))
    return {
        **SMALL,
        **draw(st.sampled_from(START)),
        **{name: draw(FIELDS[name]) for name in names},
    }


DRAWN = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)


@given(drawn())
@settings(DRAWN, max_examples=120)
def test_a_model_of_any_fields_trains_or_is_refused(fields):
    check(fields)


@pytest.mark.slow
@given(drawn())
@settings(DRAWN, max_examples=3000)
def test_many_models_train_or_are_refused(fields):
    check(fields)


def check(fields: dict[str, Any]) -> None:
    """Raises an error if a configuration is accepted and its model does not train."""
    try:
        config = GPTConfig(**fields)
    except ConfigError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message) > 20
        return
    model = GPT(config, Placement(Mesh.single(), dtype=torch.float64))
    length = min(4, config.max_position_embeddings)
    tokens = torch.arange(2 * length).view(2, -1) % config.vocab_size
    if config.predicts_tokens:
        model.loss(tokens, tokens).sum().backward()
    else:
        model(tokens).sequences.sum().backward()
    assert all(parameter.numel() for parameter in model.parameters())
