"""Spellings of a ``config.json`` mean to the conversion what they mean to transformers.

transformers reads each spelling of a published configuration and writes its own, with every default
and in the format of its version 5. Our configuration from both is the same.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from families.case import cases
from families.published import Published, published
from megatron_ckpt.families import detect_family
from megatron_models import ConfigError

transformers = pytest.importorskip("transformers")

VALUES: dict[str, tuple[Any, ...]] = {
    "rope_theta": (5000.0,),
    "rope_scaling": (None,),
    "num_key_value_heads": (None,),
    "head_dim": (None,),
    "eos_token_id": (5, [5, 6]),
    "sliding_window": (None, 16),
    "use_sliding_window": (False,),
    "layer_types": (None,),
    "tie_word_embeddings": (True, False),
}
VERSIONS_DIFFER = (("olmo3", "rope_theta = 5000.0"), ("olmo3", "type"), ("gemma3", "type"))
NAMES = ("architectures", "model_type")

FIRST = {one.family: one for one in reversed(published())}
Variant = tuple[str, dict[str, Any]]


def spellings(config: dict[str, Any]) -> Iterator[Variant]:
    """Yields spellings of a configuration, each with its difference."""
    yield "as published", config
    for name, values in VALUES.items():
        yield f"without {name}", without(config, name)
        if name == "rope_theta" and "rope_parameters" in config:
            continue  # a file with two bases is refused
        for value in values:
            yield f"{name} = {value}", {**config, name: value}
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict):
        kind = scaling.get("rope_type", scaling.get("type"))
        rest = without(without(scaling, "type"), "rope_type")
        for name in ("type", "rope_type"):
            yield name, {**config, "rope_scaling": {**rest, name: kind}}
    for name, other in (("torch_dtype", "dtype"), ("dtype", "torch_dtype")):
        if name in config:
            yield other, {**without(config, name), other: config[name]}


def absent_and_null(config: dict[str, Any]) -> Iterator[Variant]:
    """Yields the configuration without each of its fields, and with null in it."""
    for name in config:
        if name not in NAMES:
            yield f"without {name}", without(config, name)
            yield f"{name} = null", {**config, name: None}


def without(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the configuration without a field."""
    return {key: value for key, value in config.items() if key != name}


def as_transformers_writes_it(one: Published, config: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the configuration that transformers derives; None if it does not read this one."""
    given = {name: value for name, value in config.items() if name not in NAMES}
    try:
        read = getattr(transformers, cases()[one.family].config_class)(**copy.deepcopy(given))
    except Exception:  # noqa: BLE001 - its checks raise many kinds of errors
        return None
    return {**read.to_dict(), "architectures": one.config["architectures"]}


def differences(one: Published, variants: Iterator[Variant]) -> tuple[int, list[str]]:
    """Returns the number of compared spellings, and what differs.

    A file without a size is refused, although transformers has a default for it. transformers 5
    writes another ``tie_word_embeddings`` than T5 has, and reads it in files as we do. Its versions
    differ in the base of layers with a window in OLMo 3, so that files have to give it; and in the
    old name of the type of scaling in Gemma 3 and OLMo 3, which version 5 takes as no scaling.
    """
    family = detect_family(one.config["architectures"])
    count, found = 0, []
    for name, config in variants:
        theirs = as_transformers_writes_it(one, config)
        if theirs is None or (one.family, name) in VERSIONS_DIFFER:
            continue
        if one.family == "t5" and "head_dim" in config:  # to their class another name of d_kv
            continue
        if one.family == "t5" and config.get("tie_word_embeddings") is False:
            continue
        results = []
        for each in (config, theirs):
            try:
                results.append(family.config_from_hf(each))
            except ConfigError as error:
                results.append("refused" if " lacks " not in str(error) else "lacks")
        count += 1
        if results[0] not in (results[1], "lacks"):
            found.append(f"{name}: {results}")
    return count, found


def config_of(one: Published) -> dict[str, Any]:
    """Returns the published configuration without the format of quantized weights."""
    return without(dict(one.config), "quantization_config")


@pytest.mark.parametrize("one", FIRST.values(), ids=FIRST)
def test_a_spelling_means_what_it_means_to_transformers(one: Published) -> None:
    count, found = differences(one, spellings(config_of(one)))
    assert count >= 10
    assert not found


@pytest.mark.slow
@pytest.mark.parametrize("one", published(), ids=lambda one: one.model)
def test_absent_and_null_fields_mean_what_they_mean_to_transformers(one: Published) -> None:
    for variants in (spellings, absent_and_null):
        assert not differences(one, variants(config_of(one)))[1]
