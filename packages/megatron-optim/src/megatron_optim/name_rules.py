"""Factors of learning rate and weight decay that depend on the names of parameters.

A rule is text such as ``embedding.*=0.1``: a pattern of global names, in which ``*`` stands for any
text, ``?`` for a character and ``[12]`` for one of several, and a factor. If several patterns match
a name, the last one applies. This module does not import torch.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Self

from megatron_optim.errors import OptimError

QK_NORMS = ("*.q_norm.*", "*.k_norm.*")
"""Patterns of the norms of queries and keys, for ``apply_wd_to_qk_layernorm``."""

EMBEDDINGS = ("*embedding*",)
"""Patterns of token and position embeddings, for ``embedding_weight_decay``."""


@dataclass(frozen=True)
class NameRules:
    """The factors of a configuration by pattern of names.

    Attributes:
        lr_mult: Patterns and factors of the learning rate.
        weight_decay_mult: Patterns and factors of the weight decay. A factor replaces the default
            of a parameter, which is 1 for matrices and 0 for biases and gains.
        given: For each option that was given, its field and patterns, of which one must match.
    """

    lr_mult: tuple[tuple[str, float], ...]
    weight_decay_mult: tuple[tuple[str, float], ...]
    given: tuple[tuple[str, tuple[str, ...]], ...]

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Returns the rules of the settings of an `megatron_optim.OptimizerConfig`, by field.

        Raises:
            OptimError: Text is not ``PATTERN=FACTOR``.
        """
        rates = _parse(settings, "lr_mult")
        decays = _parse(settings, "weight_decay_mult")
        given: list[tuple[str, tuple[str, ...]]]
        given = [("lr_mult", (pattern,)) for pattern, _ in rates]
        given += [("weight_decay_mult", (pattern,)) for pattern, _ in decays]
        # Before the patterns of the user, so that those prevail.
        if settings["apply_wd_to_qk_layernorm"]:
            decays = [*((pattern, 1.0) for pattern in QK_NORMS), *decays]
            given.append(("apply_wd_to_qk_layernorm", QK_NORMS))
        if not settings["embedding_weight_decay"]:
            decays = [*((pattern, 0.0) for pattern in EMBEDDINGS), *decays]
            given.append(("embedding_weight_decay", EMBEDDINGS))
        return cls(tuple(rates), tuple(decays), tuple(given))

    def lr_factor(self, name: str) -> float:
        """Returns the factor of the learning rate of a parameter."""
        return _last_match(name, self.lr_mult, 1.0)

    def decay_factor(self, name: str, *, decays: bool) -> float:
        """Returns the factor of the weight decay of a parameter that by default ``decays``."""
        return _last_match(name, self.weight_decay_mult, float(decays))

    def matches(self, names: Iterable[str]) -> list[bool]:
        """Returns for each of ``given`` whether one of its patterns matches one of the names."""
        known = list(names)
        return [
            any(fnmatchcase(name, pattern) for pattern in patterns for name in known)
            for _, patterns in self.given
        ]

    def refuse_unmatched(
        self, settings: Mapping[str, Any], matched: Sequence[bool], names: Iterable[str]
    ) -> None:
        """Refuses patterns that match no parameter of the model.

        Args:
            settings: The settings of these rules.
            matched: For each of ``given``, whether it matches a parameter of any rank.
            names: Names of parameters, of which the error shows the most similar.

        Raises:
            OptimError: A pattern matches no parameter; the message names it.
        """
        for (field, patterns), found in zip(self.given, matched, strict=True):
            if found:
                continue
            words = " and ".join(map(repr, patterns))
            near = get_close_matches(patterns[0].strip("*."), list(names), n=1, cutoff=0.0)
            shown = f", such as {near[0]!r}" if near else ""
            error = f"{{{field}:name}}: no parameter matches {_literal(words)}"
            raise OptimError(
                f"{error}; give patterns of global names{shown}, or leave it out", settings
            )


def _last_match(name: str, rules: Iterable[tuple[str, float]], default: float) -> float:
    for pattern, factor in rules:
        if fnmatchcase(name, pattern):
            default = factor
    return default


def _parse(settings: Mapping[str, Any], field: str) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    words: Any = settings[field] or ()
    for word in words:
        pattern, _, text = word.rpartition("=")
        factor = _number(text)
        if not pattern or factor is None:
            raise OptimError(
                f"{{{field}:name}}: {_literal(repr(word))} is not PATTERN=FACTOR, a pattern of "
                "names and a number of at least 0, as in 'embedding.*=0.1'",
                settings,
            )
        found.append((pattern, factor))
    return found


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0.0 else None


def _literal(text: str) -> str:
    """Returns text for a message in which braces stand for fields."""
    return text.replace("{", "{{").replace("}", "}}")
