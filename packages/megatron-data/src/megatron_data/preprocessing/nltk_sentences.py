"""Splits sentences as Megatron's `preprocess_data.py --split-sentences`, with nltk (an extra)."""

import hashlib
import json
import os
from typing import Any

from megatron_data.errors import DataError

_DATA = "tokenizers/punkt_tab"
_AT_ONCE = 1_000_000  # characters; Megatron cuts longer texts there, even within a word
# Matches a word, a character that may end a sentence, and the white space after it, which nltk's
# expression does not match. `%` inserts nltk's characters of the language; groups have nltk's
# names. Megatron's expression may start anywhere in a word, which gives the same matches in
# quadratic time: a match that does not start at the beginning of a word or after the previous match
# does not start later in the word either.
_WITH_SPACE = (
    r"(?:(?<!\S)|(?<=%(SentEndChars)s))"
    r"\S*%(SentEndChars)s\s*(?=(?P<after_tok>%(NonWord)s|(?P<next_tok>\S+)))"
)
_INSTALL = "python -m nltk.downloader punkt_tab"


class NLTKSplitter:
    """Splits sentences with Punkt of nltk and its data `punkt_tab`, found by `nltk.data.path`.

    The sentences equal those of Megatron-LM's `tools/preprocess_data.py` with the same nltk and
    data, including its oddities: a text is cut every 1,000,000 characters, and each dot of
    `. . . .` is a sentence. Nothing is downloaded.

    Args:
        language: A language of `punkt_tab` (Megatron: `--lang`).
        keep_newlines: Whether a sentence includes the white space after it (Megatron:
            `--keep-newlines`).

    Raises:
        DataError: nltk is not installed, is too old or lacks its data, or the language is unknown.
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
        # Damaged files, and names that are not valid for a folder.
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
        _remove_time_limit(self._tokenizer._lang_vars)

    @property
    def record(self) -> dict[str, Any]:
        """Name and version of the splitter, digest of its data, language and option, for JSON."""
        return {
            "splitter": "nltk",
            "version": self._version,
            "data": self._digest,
            "language": self.language,
            "keep_newlines": self.keep_newlines,
        }

    def split(self, text: str) -> list[str]:
        """Returns the sentences of a text, in order."""
        segments = (text[start : start + _AT_ONCE] for start in range(0, len(text), _AT_ONCE))
        return [sentence for segment in segments for sentence in self._tokenizer.tokenize(segment)]

    def __reduce__(self) -> tuple[type["NLTKSplitter"], tuple[str, bool]]:
        return type(self), (self.language, self.keep_newlines)


def _remove_time_limit(variables: Any) -> None:
    """Removes the time limit of two regular expressions, whose time is linear in the text.

    nltk 3.10 stops them after 5 seconds, so a long text could fail on a busy machine.
    """
    variables.word_tokenize("")  # compiles and caches the expression
    for name, pattern in (
        ("_re_period_context", variables.period_context_re()),
        ("_re_word_tokenizer", variables._re_word_tokenizer),
    ):
        setattr(variables, name, getattr(pattern, "_rx", pattern))


def _missing(language: str, data: Any) -> DataError:
    """Returns an error that names the missing data or language and how to install it."""
    try:
        folder = os.fspath(data.find(_DATA).path)
        known = sorted(each.name for each in os.scandir(folder) if each.is_dir())
    except (LookupError, AttributeError, TypeError, OSError):  # missing, or in a zip file
        known = []
    if known:
        return DataError(
            f"nltk's data {_DATA} in {folder} has no language {language!r} (available: "
            f"{', '.join(known)}); give another --lang, or run {_INSTALL}"
        )
    return DataError(
        f"nltk's data {_DATA}/{language} is in none of {', '.join(map(str, data.path))}; run "
        f"{_INSTALL}, or set NLTK_DATA to a folder that holds it"
    )


def _digest(parameters: Any) -> str:
    """Returns the SHA-256 of Punkt's parameters of a language."""
    content = [
        sorted(parameters.abbrev_types),
        sorted(map(list, parameters.collocations)),
        sorted(parameters.sent_starters),
        sorted(parameters.ortho_context.items()),
    ]
    return f"sha256:{hashlib.sha256(json.dumps(content).encode()).hexdigest()}"
