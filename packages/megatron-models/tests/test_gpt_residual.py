"""Norms around sublayers, and sublayers that are parallel, for each placement."""

import pytest
from megatron_models.components.linear.spec import LinearSpec
from megatron_models.components.residual import ResidualConfig

MIXER = LinearSpec(num_layers=1, hidden_size=8)


@pytest.mark.parametrize(
    ("changes", "first", "second"),
    [
        ({}, "before", "before"),
        ({"norm_placement": "post"}, "after", "after"),
        ({"norm_placement": "sandwich"}, "before after", "before after"),
        ({"norm_placement": "sum"}, "sum", "sum"),
        ({"parallel_residual": "two_norms"}, "before", "before parallel"),
        ({"parallel_residual": "shared_norm"}, "before", "parallel shares"),
    ],
)
def test_sublayers_have_the_norms_of_their_placement(changes, first, second) -> None:
    config = ResidualConfig(num_layers=1, hidden_size=8, residual_multiplier=0.5, **changes)
    layer = config.residual_layer([("a", MIXER, 2), ("b", MIXER, 3), ("c", MIXER, 5)])
    for number, (each, expected) in enumerate(zip(layer, (first, second, second), strict=True)):
        found = {
            "before": each.norm is not None,
            "after": each.norm_after is not None,
            "sum": each.norm_sum is not None,
            "parallel": each.parallel,
            "shares": each.shares_norm,
        }
        assert " ".join(word for word, has in found.items() if has) == expected
        assert (each.name, each.site, each.multiplier) == ("abc"[number], (2, 3, 5)[number], 0.5)
    assert config.has_final_norm == (first != "sum")
    assert config.has_sequential_sublayers == ("parallel" not in second)
    assert config.has_parallel_norms == (second == "before parallel")
