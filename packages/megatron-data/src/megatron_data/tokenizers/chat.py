"""Chat templates of Hugging Face, which render conversations as text (the extra `chat`)."""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import orjson

from megatron_data.errors import DataError
from megatron_data.files import read_json, read_text, tokenizer_path
from megatron_data.tokenizers.prompt_formats import DEFAULT_FORMAT, PROMPT_FORMATS
from megatron_data.tokenizers.protocol import CONFIG_FILE

if TYPE_CHECKING:
    from megatron_data.tokenizers.template_limits import Budget

Message: TypeAlias = Mapping[str, Any]
"""`{"role": "user", "content": "…"}` with any other keys that a template uses."""

TEMPLATE_FILE = "chat_template.jinja"


@dataclass(frozen=True)
class TemplateLimits:
    """Limits on the work of a chat template for one conversation.

    The limit is on steps and not on time, so that every machine refuses the same conversations. An
    element of a list costs at least 1 step, a filter 8, a call 32, and 64 characters read or
    written cost 1.

    Attributes:
        steps: Steps for one conversation; 20 million take about 10 seconds.
        characters: Characters of each intermediate text and of the result.

    Raises:
        DataError: A limit is below 1.
    """

    steps: int = field(
        default=20_000_000,
        metadata={
            "help": "largest number of steps of the template per conversation",
            "flag": "--max-template-steps",
        },
    )
    characters: int = field(
        default=1 << 26,
        metadata={
            "help": "largest number of characters of a text that the template makes",
            "flag": "--max-template-characters",
        },
    )

    def __post_init__(self) -> None:
        if min(self.steps, self.characters) < 1:
            raise DataError(
                f"a template of {self.steps} steps and {self.characters} characters; give at "
                "least 1 of each"
            )


# Errors that a template can cause in Python. MemoryError is not among them: oversized texts are
# refused before they are made, and a lack of memory is not the fault of the conversation.
_RENDER_ERRORS = (
    TypeError,
    AttributeError,
    LookupError,
    ValueError,
    ArithmeticError,
    RecursionError,
    NameError,  # Jinja compiles an infinite number, such as 1e999, to a name
)
_STRFTIME_NOW = re.compile(r"\bstrftime_now\b")
_GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\b")


class RenderedConversation(NamedTuple):
    """A conversation rendered as text.

    Attributes:
        text: The text to tokenize.
        assistant_spans: First character and end of each part of the text that an assistant wrote.
    """

    text: str
    assistant_spans: list[tuple[int, int]]


class ChatTemplate:
    """A Jinja template that renders messages as one text, in a sandbox.

    The text of an assistant is inside `{% generation %}` blocks, as in Hugging Face transformers.
    A template without such blocks is rendered turn by turn: the text of an assistant is the text
    after the generation prompt, including its end token. If the template writes a turn differently
    once another turn follows, this is impossible and `render` raises an error.

    Args:
        source: The template. As in Hugging Face transformers, `strftime_now(format)` writes the
            local time. Templates of Llama 3.1 and later write the date with it.
        variables: Variables besides `messages`, `tools` and `add_generation_prompt`: special
            tokens such as `bos_token`, or a date.
        limits: Limits on the work for one conversation.
        now: The time that `strftime_now` writes. Defaults to the time of rendering if None.

    Raises:
        DataError: The extra is not installed, or the source is not a template.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any] | None = None,
        limits: TemplateLimits | None = None,
        now: datetime | None = None,
    ) -> None:
        try:
            import jinja2

            from megatron_data.tokenizers import sandbox, template_limits
        except ImportError:
            raise DataError(
                "chat templates need jinja2; pip install 'megatron-data[chat]'"
            ) from None
        self.source = source
        self.variables = dict(variables or {})
        self.limits = limits or TemplateLimits()
        self.now = now
        self._template_error = jinja2.TemplateError
        self._begin, self._end = sandbox.BEGIN, sandbox.END
        self._has_generation_blocks = _GENERATION_BLOCK.search(source) is not None
        self._budget = template_limits.Budget
        try:
            self._template = sandbox.SandboxedTemplate(source, self._full_budget())
        except jinja2.TemplateSyntaxError as error:
            what = " ".join(str(error.message).split())
            raise DataError(f"not a chat template: line {error.lineno}: {what:.300}") from None
        # Python's compiler refuses templates nested too deeply and numbers with too many digits.
        except (
            *(jinja2.TemplateError, SyntaxError, ValueError, OverflowError, RecursionError),
        ) as error:
            raise DataError(f"not a chat template: {_one_line(error)}") from None

    @classmethod
    def from_prompt_format(cls, prompt_format: str) -> Self:
        """Returns the template of a Megatron prompt format (`--sft-tokenizer-prompt-format`).

        Raises:
            DataError: The format is unknown, or is "default", the template of a tokenizer.
        """
        known = {name: each.template for name, each in PROMPT_FORMATS.items() if each.template}
        if prompt_format not in known:
            raise DataError(
                f"no prompt format {prompt_format!r}; give one of {', '.join(known)}, or load the "
                f"template of the tokenizer (Megatron: {DEFAULT_FORMAT})"
            )
        return cls(known[prompt_format])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a template from a file, or template and special tokens from a tokenizer's folder.

        In a folder the template is `chat_template.jinja`, or else `chat_template` in
        `tokenizer_config.json`.

        Raises:
            DataError: There is no template.
        """
        path = tokenizer_path(path)
        if path.is_file():
            return cls._from_file(path, read_text(path), {})
        if not path.is_dir():
            raise DataError(f"no chat template at {path}: there is no such file or folder")
        config = read_json(path / CONFIG_FILE) if (path / CONFIG_FILE).is_file() else {}
        if not isinstance(config, dict):
            raise DataError(f"{path / CONFIG_FILE} is not a JSON object; copy it again")
        source = config.get("chat_template")
        if isinstance(source, list):  # named templates
            source = _default_of(source)
        if (path / TEMPLATE_FILE).is_file():
            source = read_text(path / TEMPLATE_FILE)
        if not isinstance(source, str):
            raise DataError(
                f"{path} has no chat template: neither {TEMPLATE_FILE} nor chat_template in "
                f"{CONFIG_FILE}; name a prompt format (--sft-tokenizer-prompt-format "
                f"{', '.join(name for name in PROMPT_FORMATS if name != DEFAULT_FORMAT)}; "
                "with images a --tokenizer-prompt-format with a template, such as mistral) or "
                "a file (--chat-template)"
            )
        tokens = {key: value for key, value in config.items() if key.endswith("_token")}
        contents = {
            key: value.get("content") if isinstance(value, dict) else value
            for key, value in tokens.items()
        }
        variables = {key: value for key, value in contents.items() if value is not None}
        return cls._from_file(path, source, variables)

    @classmethod
    def _from_file(cls, path: Path, source: str, variables: dict[str, Any]) -> Self:
        try:
            return cls(source, variables)
        except DataError as error:
            raise DataError(f"{path}: {error}") from None

    @property
    def record(self) -> list[Any]:
        """The values that determine the rendered text, for `fingerprint`."""
        return [self.source, self.variables]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the rendered text.

        Raises:
            DataError: A variable is not a JSON value.
        """
        try:
            content = orjson.dumps(self.record, option=orjson.OPT_SORT_KEYS)
        except TypeError as error:
            raise DataError(
                f"a variable of the chat template is not a JSON value ({error}); give text, "
                "numbers, lists or objects"
            ) from None
        return f"sha256:{hashlib.sha256(content).hexdigest()}"

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        return_assistant_spans: bool = True,
    ) -> RenderedConversation:
        """Renders a conversation as text and finds the text of the assistant.

        Args:
            messages: The conversation.
            tools: Tools that the template describes to the assistant.
            add_generation_prompt: Whether to end with the template's generation prompt.
            return_assistant_spans: Whether to find the text of the assistant. If False, the spans
                may be empty and every template is accepted.

        Raises:
            DataError: The template refuses the messages, or the text of the assistant cannot be
                found.
        """
        left = self._full_budget()
        # All renderings of a conversation use one time, because they are compared.
        left.now = self.now or datetime.now()
        text = self._text(left, messages, tools, add_generation_prompt)
        if self._has_generation_blocks:
            return self._without_marks(text)
        if not return_assistant_spans:
            return RenderedConversation(text, [])
        assistant_spans = []
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self._text(left, messages[:number], tools, add_generation_prompt=True)
            after = self._text(left, messages[: number + 1], tools)
            if not (after.startswith(before) and text.startswith(after)):
                raise DataError(
                    f"the chat template writes message {number + 1} differently without the "
                    "messages after it, so the text of the assistant cannot be found; put "
                    "{% generation %} and {% endgeneration %} around it in the template"
                )
            assistant_spans.append((len(before), len(after)))
        return RenderedConversation(text, assistant_spans)

    def _full_budget(self) -> "Budget":
        return self._budget(self.limits.steps, self.limits.characters)

    def _text(
        self,
        left: "Budget",
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool = False,
    ) -> str:
        try:
            return self._template.render(
                left,
                self.variables,
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except self._template_error as error:
            raise DataError(f"the chat template refuses the messages: {_one_line(error)}") from None
        except _RENDER_ERRORS as error:
            raise DataError(
                f"the chat template cannot render the messages: {_one_line(error)}"
            ) from None

    def _without_marks(self, text: str) -> RenderedConversation:
        """Removes the marks of `{% generation %}` blocks."""
        marks = [character for character in text if character in (self._begin, self._end)]
        if marks != [self._begin, self._end] * (len(marks) // 2):
            raise DataError(
                "the messages contain U+FDD0 or U+FDD1, which are not valid in text; remove them"
            )
        plain, assistant_spans, length = [], [], 0
        for number, part in enumerate(re.split(f"[{self._begin}{self._end}]", text)):
            if number % 2:
                assistant_spans.append((length, length + len(part)))
            plain.append(part)
            length += len(part)
        return RenderedConversation("".join(plain), assistant_spans)

    @property
    def uses_time(self) -> bool:
        """Whether the template uses `strftime_now`."""
        return _STRFTIME_NOW.search(self.source) is not None

    def with_limits(self, limits: TemplateLimits) -> Self:
        """Returns this template with other limits."""
        template = copy(self)
        template.limits = limits
        return template

    def with_time(self, now: datetime) -> Self:
        """Returns this template with a fixed time for `strftime_now`."""
        template = copy(self)
        template.now = now
        return template

    def __reduce__(self) -> tuple[type["ChatTemplate"], tuple[Any, ...]]:
        return type(self), (self.source, self.variables, self.limits, self.now)


def _default_of(templates: list[Any]) -> Any:
    """Returns the template with the name "default" from a list, or None."""
    for entry in templates:
        match entry:
            case {"name": "default", "template": source}:
                return source
    return None


def _one_line(error: BaseException) -> str:
    """Returns the message of an error as one line of at most 500 characters."""
    return f"{' '.join(str(error).split()) or type(error).__name__:.500}"
