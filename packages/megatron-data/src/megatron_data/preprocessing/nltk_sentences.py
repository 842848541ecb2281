"""Sentences as Megatron's `preprocess_data.py --split-sentences` cuts them, by nltk (the extra)."""

import hashlib
import json
import os
from typing import Any

from megatron_data.errors import DataError

_DATA = "tokenizers/punkt_tab"
_AT_ONCE = 1_000_000  # characters; Megatron cuts longer texts there, in the middle of a word too
# A word, what may end a sentence, and the white space behind it, which nltk's own expression does
# not take; `%` puts nltk's characters of the language in, and groups have nltk's names. Megatron's
# begins anywhere in a word, with the same matches in quadratic time: one that is not found from the
# beginning of a word, or from behind the match before, is not found from later in the word either.
_WITH_SPACE = (
    r"(?:(?<!\S)|(?<=%(SentEndChars)s))"
    r"\S*%(SentEndChars)s\s*(?=(?P<after_tok>%(NonWord)s|(?P<next_tok>\S+)))"
)
_INSTALL = "python -m nltk.downloader punkt_tab"


class NLTKSplitter:
    """Punkt of nltk, with the data `punkt_tab` in one of the folders of `nltk.data.path`.

    The sentences are those of Megatron-LM's `tools/preprocess_data.py` with the same nltk and the
    same data, also where that is odd: a text is cut every 1,000,000 characters, and each of the
    dots of `. . . .` is a sentence. Nothing is downloaded.

    Args:
        language: name of a language of `punkt_tab` (Megatron: `--lang`).
        keep_newlines: leave the white space behind a sentence at its end (Megatron:
            `--keep-newlines`).

    Raises:
        DataError: nltk is not installed, too old or without its data, or has no such language.
    """

    def __init__(self, language: str = "english", keep_newlines: bool = False) -> None:
        self.language = language
        self.keep_newlines = keep_newlines
        try:
            import nltk
            from nltk.tokenize import punkt
        except ImportError:
            raise DataError(
                "--sentence-splitter nltk needs nltk; pip install 'megatron-data[nltk]'"
            ) from None
        self._version = nltk.__version__
        if not hasattr(punkt, "PunktTokenizer"):
            raise DataError(
                f"nltk {nltk.__version__} reads Punkt's data as pickles, which may run any code; "
                "pip install -U 'megatron-data[nltk]'"
            )
        try:
            self._tokenizer = punkt.PunktTokenizer(language)
        except LookupError:
            raise _missing(language, nltk.data) from None
        # nltk reads the files as they are, and refuses names that are no folder's.
        except (ValueError, TypeError, OSError) as error:
            raise DataError(
                f"nltk cannot read its data {_DATA}/{language}: "
                f"{' '.join(str(error).split()):.300}; {_INSTALL}"
            ) from None
        parameters = self._tokenizer._params
        self._digest = _digest(parameters)
        if keep_newlines:
            members = {"_period_context_fmt": _WITH_SPACE}
            variables = type("_WithSpace", (punkt.PunktLanguageVars,), members)
            self._tokenizer = punkt.PunktSentenceTokenizer(parameters, lang_vars=variables())
        _take_no_time(self._tokenizer._lang_vars)

    @property
    def record(self) -> dict[str, Any]:
        """Name and version of the algorithm, its data, language and treatment of white space."""
        return {
            "splitter": "nltk",
            "version": self._version,
            "data": self._digest,
            "language": self.language,
            "keep_newlines": self.keep_newlines,
        }

    def split(self, text: str) -> list[str]:
        """Returns the sentences of a text, in order."""
        pieces = (text[start : start + _AT_ONCE] for start in range(0, len(text), _AT_ONCE))
        return [sentence for piece in pieces for sentence in self._tokenizer.tokenize(piece)]

    def __reduce__(self) -> tuple[type["NLTKSplitter"], tuple[str, bool]]:
        return type(self), (self.language, self.keep_newlines)


def _take_no_time(variables: Any) -> None:
    """Lets two expressions run as long as they take, which is linear in the text.

    nltk 3.10 gives up after 5 seconds, so a long text would fail on a busy machine alone.
    """
    variables.word_tokenize("")  # makes the expression, and keeps it
    for name, pattern in (
        ("_re_period_context", variables.period_context_re()),
        ("_re_word_tokenizer", variables._re_word_tokenizer),
    ):
        setattr(variables, name, getattr(pattern, "_rx", pattern))


def _missing(language: str, data: Any) -> DataError:
    """Says whether all of the data or a language is missing, and how to get it."""
    try:
        folder = os.fspath(data.find(_DATA).path)
        known = sorted(each.name for each in os.scandir(folder) if each.is_dir())
    except (LookupError, AttributeError, TypeError, OSError):  # none, or packed in a zip file
        known = []
    if known:
        return DataError(
            f"nltk's data {_DATA} in {folder} has no language {language!r} (there: "
            f"{', '.join(known)}); give another --lang, or {_INSTALL}"
        )
    return DataError(
        f"nltk's data {_DATA}/{language} is in none of {', '.join(map(str, data.path))}; "
        f"{_INSTALL}, or name a folder that holds it by NLTK_DATA"
    )


def _digest(parameters: Any) -> str:
    """SHA-256 of what Punkt learned of a language."""
    content = [
        sorted(parameters.abbrev_types),
        sorted(map(list, parameters.collocations)),
        sorted(parameters.sent_starters),
        sorted(parameters.ortho_context.items()),
    ]
    return f"sha256:{hashlib.sha256(json.dumps(content).encode()).hexdigest()}"
