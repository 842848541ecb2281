"""What is known about a family for its proof, as plain data, and the cases of all families."""

import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # not every session has Hypothesis
    from hypothesis.strategies import SearchStrategy

    from families.comparison import Comparison

FOLDER = Path(__file__).parents[2] / "integration_tests" / "parity" / "families"

#: Fields with a refused value in every family.
REFUSED = frozenset({"architectures", "model_type", "is_encoder_decoder"})


@dataclass(frozen=True, kw_only=True)
class FamilyCase:
    """A family and its counterpart in transformers.

    Attributes:
        family: Name of the family, which is the name of the case's file.
        config_class: Name of transformers' configuration class.
        model_class: Name of transformers' model class.
        mathematics: The family that represents its kind of mathematics, such as ``"llama"``. The
            costly checks run in the default tests only for representatives, all in the slow ones.
        settings: Content of a small ``config.json``. It is the model of the layouts, so it has
            `layouts.models.LAYERS` layers, at least `layouts.models.SEQUENCE` positions, a
            vocabulary of 150, and numbers of heads, query groups and experts that two ranks divide.
        draws: Strategy of fields that replace those of `settings`, for every field that matters.
            All drawn values are supported.
        refused: Fields of transformers' configuration with other values that are refused, besides
            `REFUSED`. All other changes have to give equal logits.
        others: Other values of fields, besides `families.fields.OTHERS`.
        coupled: For fields that transformers refuses alone, the other fields that change with them.
        attention: Implementation of attention in transformers that is compared.
        words: Parts of the errors of fields that the error does not name.
        refused_axes: Axes that cannot cut the models, whose layouts are refused.
        trained: Fields of our configuration that differ in the layouts, for models without a loss.
        comparison: ``module:NAME`` of the `families.comparison.Comparison` of its kind of model.
            Defaults to that of decoders.
    """

    family: str
    config_class: str
    model_class: str
    mathematics: str
    settings: Mapping[str, Any]
    draws: "SearchStrategy[dict[str, Any]]"
    refused: frozenset[str] = frozenset()
    others: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    coupled: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    attention: str = "eager"
    words: Mapping[str, str] = field(default_factory=dict)
    refused_axes: frozenset[str] = frozenset()
    trained: Mapping[str, Any] = field(default_factory=dict)
    comparison: str = "families.comparison:CAUSAL"

    @property
    def represents(self) -> bool:
        """Whether it represents its kind of mathematics."""
        return self.family == self.mathematics

    @property
    def kind(self) -> "Comparison":
        """How models of its kind are compared."""
        module, _, name = self.comparison.partition(":")
        found: Comparison = getattr(importlib.import_module(module), name)
        return found

    @property
    def hf_config(self) -> dict[str, Any]:
        """`settings` as a ``config.json``, without transformers' defaults."""
        return {"architectures": [self.model_class], **self.settings}


@cache
def cases() -> Mapping[str, FamilyCase]:
    """Returns the cases of all files in `FOLDER` by family.

    Raises:
        ValueError: A file holds the case of another family.
    """
    found: dict[str, FamilyCase] = {}
    for module in pkgutil.iter_modules([str(FOLDER)]):
        path = FOLDER / f"{module.name}.py"
        spec = importlib.util.spec_from_file_location(f"family_cases.{module.name}", path)
        assert spec is not None and spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        case: FamilyCase = loaded.CASE
        if case.family != module.name:
            raise ValueError(f"{path} holds the case of {case.family!r}; name it {case.family}.py")
        found[case.family] = case
    return found
