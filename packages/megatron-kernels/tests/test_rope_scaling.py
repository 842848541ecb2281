"""Rules that scale rotary frequencies: their limits, by their definitions."""

import math

import pytest
import torch
from megatron_kernels import (
    DynamicNtkScaling,
    FactorScaling,
    KernelError,
    LengthScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NtkScaling,
    RopeScaling,
    YarnScaling,
    rope_frequencies,
    rope_tables,
)

F64 = torch.float64
close = torch.testing.assert_close


@pytest.mark.parametrize("factor", [1.0, 4.0])
@pytest.mark.parametrize("dim", [4, 6, 64])
def test_ntk_scaling_multiplies_the_base(dim: int, factor: float) -> None:
    base = 10_000.0
    found = rope_frequencies(dim, base, scaling=NtkScaling(factor))
    close(found, rope_frequencies(dim, base * factor ** (dim / (dim - 2))))
    plain = rope_frequencies(dim, base)
    assert float(found[0]) == 1.0
    assert float(found[-1]) == pytest.approx(float(plain[-1]) / factor, rel=1e-14)


def test_ntk_scaling_keeps_a_single_frequency() -> None:
    assert rope_frequencies(2, scaling=NtkScaling(8.0)).tolist() == [1.0]


@pytest.mark.parametrize(
    ("length", "factor"), [(1, 1.0), (100, 1.0), (101, 1.02), (150, 2.0), (200, 3.0), (400, 7.0)]
)
def test_dynamic_ntk_scaling_begins_beyond_the_original_context(length: int, factor: float) -> None:
    # Its authors: factor * length / original - (factor - 1).
    found = DynamicNtkScaling(2.0, 100).at(length)
    assert found.factor == pytest.approx(factor)
    assert factor == pytest.approx(max(2.0 * length / 100 - 1.0, 1.0))


def test_factors_divide_their_frequencies() -> None:
    plain = rope_frequencies(6)
    found = rope_frequencies(6, scaling=FactorScaling((1.0, 2.0, 4.0)))
    close(found, plain / torch.tensor([1.0, 2.0, 4.0], dtype=F64))
    for factors in ((1.0, 2.0), (1.0,) * 4, ()):
        with pytest.raises(KernelError, match=f"has {len(factors)} factors for 3 frequencies"):
            rope_frequencies(6, scaling=FactorScaling(factors))


def test_long_rope_has_short_factors_up_to_the_original_context() -> None:
    scaling = LongRopeScaling((1.0, 2.0), (3.0, 4.0), 4.0, 16)
    for length, factors in ((1, (1.0, 2.0)), (16, (1.0, 2.0)), (17, (3.0, 4.0))):
        rule = scaling.at(length)
        assert rule.factors == factors and rule.attention_factor == scaling.attention_factor
    # sqrt(1 + ln 4 / ln 16) = sqrt(3 / 2)
    assert scaling.attention_factor == pytest.approx(math.sqrt(1.5), rel=1e-15)


def test_long_rope_scales_no_logits_of_a_context_that_is_not_longer() -> None:
    for factor, expected in ((0.5, 1.0), (1.0, 1.0), (2.0, math.sqrt(1.25))):
        scaling = LongRopeScaling((1.0,), (1.0,), factor, 16)
        assert scaling.attention_factor == pytest.approx(expected, rel=1e-15)
    fixed = LongRopeScaling((1.0,), (1.0,), 4.0, 16, fixed_attention_factor=0.0)
    assert fixed.attention_factor == fixed.at(5).attention_factor == 0.0


def test_only_some_rules_scale_the_logits() -> None:
    for scaling in (LinearScaling(4.0), Llama3Scaling(4.0), NtkScaling(4.0), FactorScaling((1.0,))):
        assert scaling.attention_factor == 1.0 and isinstance(scaling, RopeScaling)
    for by_length in (DynamicNtkScaling(2.0, 8), LongRopeScaling((1.0,), (1.0,), 2.0, 8)):
        assert isinstance(by_length, LengthScaling)
    factor = FactorScaling((1.0, 1.0), attention_factor=3.0)
    cos, sin = rope_tables(torch.arange(2), rope_frequencies(4), F64, factor)
    close((cos**2 + sin**2).sqrt(), torch.full_like(cos, 3.0))


def test_llama_3_keeps_frequencies_of_many_periods_and_divides_those_of_few() -> None:
    # 4 periods within the original context are kept, 1 is divided, 2.5 is half of both.
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 100)
    periods = torch.tensor([9.0, 4.0, 2.5, 1.0, 0.25], dtype=F64)
    plain = 2 * math.pi * periods / 100
    shares = torch.tensor([1.0, 1.0, (1 + 1 / 8) / 2, 1 / 8, 1 / 8], dtype=F64)
    close(scaling.scale(plain, 10_000.0), plain * shares)
    defaults = Llama3Scaling(8.0)
    assert (defaults.low_freq_factor, defaults.high_freq_factor) == (1.0, 4.0)
    assert defaults.original_max_position_embeddings == 8192


def magnitude(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1.0


def test_yarn_scales_logits_by_the_ratio_of_two_magnitudes() -> None:
    for scaling, expected in (
        (YarnScaling(40.0), magnitude(40)),
        (YarnScaling(40.0, mscale=0.5), magnitude(40, 0.5)),
        (YarnScaling(40.0, mscale=1.0, mscale_all_dim=0.5), magnitude(40) / magnitude(40, 0.5)),
        (YarnScaling(1.0, mscale=0.5), 1.0),
        (YarnScaling(0.5), 1.0),
        (YarnScaling(2.0), magnitude(2)),
        (YarnScaling(40.0, fixed_attention_factor=0.0), 0.0),
    ):
        assert scaling.attention_factor == pytest.approx(expected, rel=1e-15)


def test_yarn_blends_between_whole_indices_unless_they_are_not_truncated() -> None:
    def index(periods: float, dim: int, base: float) -> float:
        """Returns the index of a frequency with some periods within 4096 tokens."""
        return dim * math.log(4096 / (2 * math.pi * periods)) / (2 * math.log(base))

    low, high = index(32, 64, 1e4), index(1, 64, 1e4)
    exact = YarnScaling(40.0, truncate=False)
    assert exact.correction_range(64, 1e4) == pytest.approx((low, high))
    assert YarnScaling(40.0).correction_range(64, 1e4) == (math.floor(low), math.ceil(high))
    plain = rope_frequencies(64)
    slowed = (1 - rope_frequencies(64, scaling=exact) / plain) / (1 - 1 / 40)
    close(slowed, ((torch.arange(32, dtype=F64) - low) / (high - low)).clamp(0, 1))
    assert index(1, 64, 1e4) > exact.correction_range(64, 1e5)[1] == index(1, 64, 1e5)


def test_the_range_of_yarn_ends_at_the_first_and_the_last_channel() -> None:
    wide = YarnScaling(4.0, 4096, beta_fast=1e6, beta_slow=1e-9)
    assert wide.correction_range(64, 1e4) == (0.0, 63.0)
    few = YarnScaling(4.0, 4096, beta_fast=32.0, beta_slow=32.0, truncate=False)
    low, high = few.correction_range(64, 1e4)
    assert low == high
    step = few.scale(torch.ones(32, dtype=F64), 1e4)  # no division by zero, but a step
    assert step.tolist() == [1.0] * (math.floor(low) + 1) + [0.25] * (31 - math.floor(low))


def test_positions_of_one_sequence_are_those_of_all_samples() -> None:
    frequencies = torch.tensor([1.0, 0.5], dtype=F64)
    cos, sin = rope_tables(torch.tensor([0, 3]), frequencies)
    assert cos.shape == sin.shape == (2, 1, 2) and cos.dtype == torch.float32
    close(cos[1, 0], torch.tensor([3.0, 1.5]).cos())
    close(sin[1, 0], torch.tensor([3.0, 1.5]).sin())
    of_samples = rope_tables(torch.tensor([[0, 3], [5, 1]]), frequencies, F64)
    assert of_samples[0].shape == (2, 2, 2)
    close(of_samples[0][0, 1], torch.tensor([5.0, 2.5], dtype=F64).cos())


@pytest.mark.parametrize(
    ("dim", "percent", "channels"), [(8, 1.0, 8), (8, 0.5, 4), (10, 0.45, 4), (2, 1.0, 2)]
)
def test_the_share_of_rotated_channels_is_rounded_down(
    dim: int, percent: float, channels: int
) -> None:
    found = rope_frequencies(dim, 100.0, percent)
    expected = [100.0 ** (-2 * i / channels) for i in range(channels // 2)]
    assert found.tolist() == pytest.approx(expected) and found.dtype == F64
