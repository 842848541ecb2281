"""Gradients in bfloat16 do not depend on the number of tokens; tooling/bf16_gradients.py measures.

The default tests have one thread and a GPT.
"""

import pytest
from bf16_gradients import GROWTH, LIMIT, MODELS, TOKENS, growth, measure
from megatron_kernels.ops.norm import summed_rows


@pytest.mark.parametrize(
    ("kind", "threads", "ranks"),
    [
        ("gpt", 1, 1),
        *(
            pytest.param(kind, *counts, marks=pytest.mark.slow)
            for kind in MODELS
            for counts in ((1, 1), (2, 1), (1, 2))
        ),
    ],
)
def test_gradients_are_as_near_to_float32_with_many_tokens_as_with_few(
    kind: str, threads: int, ranks: int
) -> None:
    found = measure(kind, TOKENS, threads, ranks)
    assert max(value for each in found for value in each.values()) < LIMIT
    assert found[0].keys() == found[-1].keys()
    assert growth(found) <= GROWTH


def test_sums_in_16_bits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants torch's own backward pass of LayerNorm, which adds up tokens in bfloat16."""
    monkeypatch.setattr(summed_rows, "sums_rows_in_16_bits", lambda x: False)
    found = measure("gpt", (TOKENS[0], TOKENS[1]), 1, 1)
    assert found[-1]["final_norm.bias"] > LIMIT and growth(found) > GROWTH
