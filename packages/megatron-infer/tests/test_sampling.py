import math
from unittest import mock

import pytest
import torch
from megatron_infer import (
    InferError,
    Sampler,
    SamplingParams,
    check_tokens,
    sampling_probabilities,
)

VOCABULARY = 20


@pytest.fixture
def logits() -> torch.Tensor:
    torch.manual_seed(5)
    return 2.0 * torch.randn(VOCABULARY)


def exact(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> list[float]:
    """Returns the distribution by definition, token by token."""
    weights = [math.exp(x / temperature) for x in logits.tolist()]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])[: top_k or None]
    total = math.fsum(weights[i] for i in order)
    kept, reached = [], 0.0
    for i in order:
        if reached >= top_p:
            break
        kept.append(i)
        reached += weights[i] / total
    total = math.fsum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(weights))]


def chi_square(draws: list[int], expected: list[float]) -> tuple[float, int]:
    counts = [draws.count(token) for token in range(VOCABULARY)]
    assert all(p > 0 for count, p in zip(counts, expected, strict=True) if count)
    possible = [(c, p * len(draws)) for c, p in zip(counts, expected, strict=True) if p > 0]
    return math.fsum((c - e) ** 2 / e for c, e in possible), len(possible) - 1


def limit(degrees: int) -> float:
    """Returns the chi-square value that is exceeded once in 10,000 (Wilson and Hilferty)."""
    share = 2 / (9 * degrees)
    return degrees * (1 - share + 3.719 * math.sqrt(share)) ** 3


SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 5},
    {"top_p": 0.8},
    {"temperature": 1.5, "top_k": 10, "top_p": 0.9},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_distribution_equals_its_definition(logits: torch.Tensor, settings: dict) -> None:
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **settings}
    ours = sampling_probabilities(logits[None], [SamplingParams(**settings)])[0]
    assert ours.tolist() == pytest.approx(exact(logits, **full), rel=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        SETTINGS[0],
        *(pytest.param(one, marks=pytest.mark.slow) for one in SETTINGS[1:-1]),
        SETTINGS[-1],
    ],
)
def test_successive_draws_follow_the_exact_distribution(
    logits: torch.Tensor, settings: dict
) -> None:
    sampler = Sampler([SamplingParams(seed=seed, **settings) for seed in range(8)])
    batch = logits.expand(8, -1)
    draws = torch.cat([sampler(batch) for _ in range(500)]).tolist()
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **settings}
    statistic, degrees = chi_square(draws, exact(logits, **full))
    assert statistic < limit(degrees)


def test_first_draws_of_many_seeds_follow_the_exact_distribution(
    logits: torch.Tensor,
) -> None:
    rows = 4000
    sampler = Sampler([SamplingParams(seed=seed) for seed in range(rows)])
    draws = sampler(logits.expand(rows, -1)).tolist()
    statistic, degrees = chi_square(draws, exact(logits, 1.0, 0, 1.0))
    assert statistic < limit(degrees)


def test_temperature_zero_takes_the_likeliest_token() -> None:
    torch.manual_seed(0)
    logits = torch.randn(50, VOCABULARY)
    tokens = Sampler([SamplingParams(temperature=0.0)] * 50)(logits)
    assert torch.equal(tokens, logits.argmax(-1))


def test_draws_do_not_depend_on_other_requests() -> None:
    torch.manual_seed(0)
    steps = torch.randn(30, 4, VOCABULARY)
    params = [
        SamplingParams(seed=1),
        SamplingParams(temperature=0.0),
        SamplingParams(seed=3, top_k=4, temperature=0.7),
        SamplingParams(seed=4, top_p=0.6),
    ]
    together = Sampler(params)
    batch = torch.stack([together(logits) for logits in steps])
    for row, one in enumerate(params):
        alone = Sampler([one])
        tokens = [int(alone(logits[row : row + 1])[0]) for logits in steps]
        assert tokens == batch[:, row].tolist()


def test_equal_seeds_repeat_and_no_seed_does_not() -> None:
    logits = torch.zeros(1, VOCABULARY)

    def draw(seed: int | None) -> list[int]:
        sampler = Sampler([SamplingParams(seed=seed)])
        return [int(sampler(logits)[0]) for _ in range(40)]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert draw(None) != draw(None)


def test_a_tail_of_minus_infinity_is_never_drawn() -> None:
    logits = torch.full((1, VOCABULARY), float("-inf"))
    logits[0, 3] = 0.0
    sampler = Sampler([SamplingParams(seed=0)])
    assert {int(sampler(logits)[0]) for _ in range(100)} == {3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_with_nan_are_an_error(temperature: float) -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[1, 2] = math.nan
    tokens = Sampler([SamplingParams(temperature=temperature, seed=1)] * 2)(logits).tolist()
    assert tokens[0] >= 0 and tokens[1] == -1
    check_tokens(tokens[:1])
    with pytest.raises(InferError, match="NaN"):
        check_tokens(tokens)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"temperature": math.inf}, "temperature"),
        ({"seed": 2**63}, "seed"),
    ],
)
def test_impossible_settings_name_the_value(settings: dict, names: str) -> None:
    with pytest.raises(InferError, match=names):
        SamplingParams(**settings)


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 5e-324}, {"top_k": 10**400}])
def test_a_temperature_near_zero_takes_the_likeliest_token(
    logits: torch.Tensor, settings: dict
) -> None:
    params = SamplingParams(temperature=5e-324, seed=1, **settings)
    weights = sampling_probabilities(1e30 * logits[None], [params])[0]
    assert weights.tolist() == [float(token == int(logits.argmax())) for token in range(VOCABULARY)]
    assert int(Sampler([params])(1e30 * logits[None])[0]) == int(logits.argmax())


def test_logits_that_are_infinite_are_refused_and_masked_ones_are_not(logits: torch.Tensor) -> None:
    params = SamplingParams(seed=1)
    logits[3] = float("-inf")
    assert sampling_probabilities(logits[None], [params])[0, 3] == 0.0
    assert Sampler([params])(logits[None]).item() != 3
    logits[4] = float("inf")
    with pytest.raises(InferError, match="NaN or infinity"):
        check_tokens(Sampler([params])(logits[None]).tolist())


@pytest.mark.parametrize(
    ("equal", "settings", "expected"),
    [
        (2, {"top_p": 0.5}, [0]),  # a token that reaches the mass exactly is the last one
        (4, {"top_p": 0.5}, [0, 1]),
        (4, {"top_p": 0.75, "top_k": 4}, [0, 1, 2]),
        (400, {"top_k": 3}, [0, 1, 2]),  # of equal logits, those of lower ids
        (400, {"temperature": 0.0}, [0]),
    ],
)
def test_limits_that_fall_on_equal_logits_keep_the_lower_ids(
    equal: int, settings: dict, expected: list[int]
) -> None:
    weights = sampling_probabilities(torch.zeros(1, equal), [SamplingParams(**settings)])[0]
    assert weights.nonzero().flatten().tolist() == expected
    assert set(weights[expected].tolist()) == {1 / len(expected)}


def test_no_top_p_keeps_a_tail_that_rounding_hides() -> None:
    logits = torch.tensor([[0.0, -40.0, -41.0, -42.0]])  # 1 + exp(-40) is 1 in float64
    weights = sampling_probabilities(logits, [SamplingParams(top_k=3)])[0]
    expected = [1.0, math.exp(-40), math.exp(-41), 0.0]
    assert weights.tolist() == pytest.approx(expected, rel=1e-6, abs=0.0)


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (0.25, 1), (0.5, 2), (1 - 2**-53, 2)])
def test_a_number_on_the_limit_of_two_tokens_draws_the_second(
    monkeypatch: pytest.MonkeyPatch, number: float, token: int
) -> None:
    """Intervals of tokens are closed below and open above; tokens without weight have none."""
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor([number], dtype=torch.float64))
    logits = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]])
    assert Sampler([SamplingParams()])(logits).tolist() == [token]


def test_the_limits_themselves_are_possible_settings() -> None:
    for settings in (
        {"max_new_tokens": 1},
        {"temperature": 0.0},
        {"top_k": 0},
        {"top_p": 1.0},
        {"seed": 0},
        {"seed": 2**63 - 1},
    ):
        params = SamplingParams(**settings)
        assert {name: getattr(params, name) for name in settings} == settings
        Sampler([params])(torch.zeros(1, VOCABULARY))
    assert SamplingParams() == SamplingParams(128, 1.0, 0, 1.0, None)  # as documented


@pytest.mark.parametrize("warm", [{}, {"top_k": 3}, {"top_p": 0.5}])
def test_a_greedy_row_beside_a_drawn_one_has_all_mass_on_its_likeliest_token(
    logits: torch.Tensor, warm: dict
) -> None:
    rows = torch.stack([logits, logits.flip(0)])
    params = [SamplingParams(temperature=0.0), SamplingParams(**warm)]
    weights = sampling_probabilities(rows, params)
    assert weights.dtype == torch.float64
    likeliest = int(logits.argmax())
    assert weights[0].tolist() == [float(token == likeliest) for token in range(VOCABULARY)]
    alone = sampling_probabilities(rows[1:], params[1:])
    assert weights[1].tolist() == pytest.approx(alone[0].tolist(), rel=1e-12)


def test_equally_likely_tokens_share_the_numbers_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.tensor([0.0, 0.49, 0.5, 0.99], dtype=torch.float64)
    waiting = iter(numbers.split(1))
    monkeypatch.setattr(torch, "rand", lambda *_, **__: next(waiting))
    tokens = Sampler([SamplingParams()] * 4)(torch.zeros(4, 2))
    assert tokens.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_limit_of_few_tokens_keeps_as_many(logits: torch.Tensor, top_k: int) -> None:
    weights = sampling_probabilities(logits[None], [SamplingParams(top_k=top_k)])[0]
    assert set(weights.nonzero().flatten().tolist()) == set(logits.topk(top_k).indices.tolist())


def test_requests_of_temperature_zero_draw_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", mock.Mock(side_effect=AssertionError("drawn")))
    tokens = Sampler([SamplingParams(temperature=0.0)] * 2)(torch.eye(3)[1:])
    assert tokens.tolist() == [1, 2]


def test_the_vocabulary_is_sorted_only_for_limits(
    logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "sort", mock.Mock(side_effect=AssertionError("sorted")))
    sampling_probabilities(
        logits.expand(2, -1), [SamplingParams(), SamplingParams(temperature=2.0)]
    )
    for limit in ({"top_k": 3}, {"top_p": 0.5}):
        with pytest.raises(AssertionError, match="sorted"):
            sampling_probabilities(logits[None], [SamplingParams(**limit)])
