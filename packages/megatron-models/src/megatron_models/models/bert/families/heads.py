"""How the class in ``architectures`` and the labels determine the heads of an encoder."""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_models.components.heads.config import OUTPUTS
from megatron_models.errors import ConfigError
from megatron_models.families.settings import Custom, HFConfig, unsupported_field
from megatron_models.models.bert.config import BertConfig


@dataclass(frozen=True)
class Heads:
    """The heads that a class of transformers has.

    Attributes:
        masked_lm_head: Whether tokens have logits.
        bert_binary_head: Whether there is a binary head.
        bert_pooler: Whether there is a pooler without the binary head.
        task_head: The task head.
    """

    masked_lm_head: bool = False
    bert_binary_head: bool = False
    bert_pooler: bool = False
    task_head: str = "none"


def heads(classes: Mapping[str, Heads]) -> Custom:
    """Returns the setting of the heads.

    The first entry of ``architectures`` names the class. A class of classification is one of
    regression if its ``problem_type`` says so, or if it has one label. Transformers has no class of
    rewards: they are exported as one value, and imported as a regression.

    Args:
        classes: Heads of each class of the family.
    """
    labelled = [name for name, each in classes.items() if each.task_head == "classification"]

    def read(title: str, hf_config: HFConfig) -> dict[str, Any]:
        named = hf_config.get("architectures") or []
        found = None
        if isinstance(named, (list, tuple)):
            found = next(
                (each for each in named if isinstance(each, str) and each in classes), None
            )
        if found is None:
            raise ConfigError(
                f"{title} models have the architectures {', '.join(classes)}, not "
                f"{reprlib.repr(named)}"
            )
        fields: dict[str, Any] = dict(vars(classes[found]))
        if found not in labelled:
            return fields
        width = _labels(title, hf_config)
        kind = hf_config.get("problem_type")
        if kind == "regression" or (kind is None and width == 1):
            fields["task_head"] = "regression"
        return {**fields, "num_labels": width}

    def write(config: BertConfig) -> dict[str, Any]:
        wanted = Heads(
            config.predicts_tokens,
            config.bert_binary_head and config.task_head == "none",
            config.bert_pooler and config.task_head == "none",
            {"regression": "classification", "reward": "classification"}.get(
                config.task_head, config.task_head
            ),
        )
        name = next((name for name, each in classes.items() if each == wanted), None)
        if name is None:
            raise unsupported_field("heads", " or ".join(classes), vars(wanted))
        if config.head_pooling not in ("auto", "first"):
            raise unsupported_field("head_pooling", "'first'", config.head_pooling)
        content: dict[str, Any] = {"architectures": [name]}
        if name in labelled:
            numbers = range(config.num_labels)
            content["id2label"] = {str(n): f"LABEL_{n}" for n in numbers}
            content["label2id"] = {f"LABEL_{n}": n for n in numbers}
            if config.task_head != "classification":
                content["problem_type"] = "regression"
            elif config.num_labels == 1:
                content["problem_type"] = "single_label_classification"
        return content

    return Custom(
        fields=(
            "masked_lm_head",
            "bert_binary_head",
            "bert_pooler",
            "task_head",
            "num_labels",
            "head_pooling",
        ),
        hf_fields=("architectures", "id2label", "label2id", "num_labels", "problem_type"),
        read=read,
        write=write,
    )


def _labels(title: str, hf_config: HFConfig) -> int:
    """Returns the number of labels, which files give as a map from numbers to names."""
    names, count = hf_config.get("id2label"), hf_config.get("num_labels")
    if names is not None and not isinstance(names, Mapping):
        raise ConfigError(f"the {title} configuration has id2label = {reprlib.repr(names)}, no map")
    if names is not None:
        return len(names)
    if count is None:
        return OUTPUTS["classification"]
    if type(count) is not int:
        raise ConfigError(f"the {title} configuration has num_labels = {reprlib.repr(count)}")
    return count
