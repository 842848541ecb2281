"""Strategies of settings that many families share, with Llama's names of fields."""

import contextlib
from typing import Any, cast

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

Settings = SearchStrategy[dict[str, Any]]

#: Positions of the models that are compared; sequences are half as long.
POSITIONS = 64

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


def merged(*parts: Settings) -> Settings:
    """Returns the strategy of the fields of all parts."""
    return st.tuples(*parts).map(lambda all_: {k: v for part in all_ for k, v in part.items()})


def optional(**fields: SearchStrategy[Any]) -> Settings:
    """Returns the strategy of fields that may be absent."""
    return st.fixed_dictionaries({}, optional=dict(fields))


def heads(*, head_dim: bool = True, groups: bool = True) -> Settings:
    """Returns the strategy of numbers of heads, query groups and channels.

    Args:
        head_dim: Whether the family has a head dimension apart from the hidden size.
        groups: Whether several heads may share keys and values.
    """
    counts = st.sampled_from((1, 2, 3)), st.sampled_from((1, 2, 3)), st.sampled_from((8, 12, 16))

    def fields(drawn: tuple[int, int, int, bool]) -> dict[str, Any]:
        number, share, channels, free = drawn
        share = share if groups else 1
        found: dict[str, Any] = {"num_attention_heads": number * share}
        found["hidden_size"] = number * share * channels
        if groups:
            found["num_key_value_heads"] = number
        if head_dim and free:
            found |= {"head_dim": channels, "hidden_size": 36}
        return found

    return st.tuples(*counts, st.booleans()).map(fields)


def sizes(**more: SearchStrategy[Any]) -> Settings:
    """Returns the strategy of depth, width, vocabulary, epsilon and tying, and of more fields."""
    return st.fixed_dictionaries(
        {
            "num_hidden_layers": st.sampled_from((1, 2, 3)),
            "intermediate_size": st.sampled_from((20, 40, 56)),
            "vocab_size": st.sampled_from((101, 150)),
            "rms_norm_eps": st.sampled_from((1e-6, 1e-5, 1e-2)),
            "tie_word_embeddings": st.booleans(),
            **more,
        }
    )


def rope(*kinds: str) -> Settings:
    """Returns the strategy of rotary settings: ``default``, ``linear``, ``llama3``, ``yarn``, ...

    Types of `scaled`, each with an original length below that of the drawn tokens.
    """
    bases, factors = st.sampled_from((100.0, 1e4, 5e5)), st.sampled_from((2.0, 8.0))
    scaled: dict[str, dict[str, SearchStrategy[Any]]] = {
        "default": {},
        "linear": {"factor": factors},
        "llama3": {"factor": factors, **{name: st.just(value) for name, value in LLAMA3.items()}},
        "dynamic": {"factor": factors},
        "yarn": {
            "factor": factors,
            "original_max_position_embeddings": st.just(8),
            "beta_fast": st.sampled_from((2.0, 32.0)),
            "truncate": st.booleans(),
            "attention_factor": st.sampled_from((None, 1.3)),
            "mscale": st.sampled_from((None, 0.7)),
            "mscale_all_dim": st.sampled_from((None, 0.4)),
        },
    }
    each = [
        st.fixed_dictionaries({"rope_type": st.just(kind), "rope_theta": bases, **scaled[kind]})
        for kind in kinds
    ]
    return st.fixed_dictionaries({"rope_parameters": st.one_of(each)})


def partly_rotated(settings: Settings, *fractions: float) -> Settings:
    """Returns the strategy of rotary settings that rotate one of the fractions of a head."""

    def fields(drawn: tuple[dict[str, Any], float]) -> dict[str, Any]:
        given, fraction = drawn
        return {"rope_parameters": given["rope_parameters"] | {"partial_rotary_factor": fraction}}

    return st.tuples(settings, st.sampled_from(fractions)).map(fields)


def rope_by_layer(*kinds: str) -> Settings:
    """Returns the strategy of `rope` for layers without a window, and of a base for the others."""

    def fields(drawn: tuple[dict[str, Any], float]) -> dict[str, Any]:
        given, base = drawn
        windowed = {"rope_type": "default", "rope_theta": base}
        layers = {"full_attention": given["rope_parameters"], "sliding_attention": windowed}
        return {"rope_parameters": layers}

    return st.tuples(rope(*kinds), st.sampled_from((100.0, 1e4))).map(fields)


class _EnoughError(Exception):
    """Ends a search for draws."""


def drawn(strategy: Settings, count: int, most: int | None = None) -> list[dict[str, Any]]:
    """Returns ``count`` draws, the same in every run.

    The first draw of Hypothesis, which is the simplest, is left out.

    Args:
        strategy: Strategy of settings.
        count: Number of draws.
        most: Number of draws of which these are the first. Defaults to ``count``.
    """
    simplest: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []

    def collect(one: dict[str, Any]) -> None:
        if not simplest:
            simplest.append(one)
        elif one not in (*simplest, *found):
            found.append(one)
        if len(found) >= count:
            raise _EnoughError

    run = settings(
        max_examples=3 * (most or count) + 1,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with contextlib.suppress(_EnoughError):
        cast("Any", seed(18)(run(given(strategy)(collect))))()
    return found[:count]
