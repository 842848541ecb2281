"""Fields of a ``config.json`` with a value of another type are read or refused by every family."""

from typing import Any

import pytest

pytest.importorskip("transformers")

from families.case import FamilyCase, cases
from megatron_ckpt.families import detect_family
from megatron_models import ConfigError

WRONG: tuple[Any, ...] = (
    3,
    10**400,
    True,
    1.5,
    "x",
    [],
    [1],
    ["x"],
    [[]],
    [{}],
    {},
    {"a": 1},
    {"a": {}},
)
WINDOWS = (
    "sliding_window",
    "attention_chunk_size",
    "layer_types",
    "auto_map",
    "use_sliding_window",
)


@pytest.mark.parametrize("case", cases().values(), ids=cases().keys())
def test_a_value_of_another_type_is_read_or_refused_in_one_line(case: FamilyCase) -> None:
    family = detect_family([case.model_class])
    base = case.hf_config
    read = {name for rule in (*family.settings.values(), *family.custom) for name in rule.hf_fields}
    refused = 0
    for name in sorted({*base, *read, *WINDOWS}):
        inner = base.get(name)
        changed = list(WRONG)
        if isinstance(inner, dict):
            changed += [{**inner, key: value} for key in inner for value in WRONG]
        for value in changed:
            try:
                family.config_from_hf({**base, name: value})
            except ConfigError as error:
                refused += 1
                assert "\n" not in str(error)
    assert refused > 50


def test_all_fields_of_a_wrong_type_are_named_at_once() -> None:
    family = detect_family(["BertForPreTraining"])
    base = {**cases()["bert"].hf_config, "architectures": 3, "hidden_act": [], "tie": 7}
    with pytest.raises(ConfigError) as caught:
        family.config_from_hf(base)
    for words in ("not 3", "hidden_act = []", "'tie' = 7"):
        assert str(caught.value).count(words) == 1, str(caught.value)
