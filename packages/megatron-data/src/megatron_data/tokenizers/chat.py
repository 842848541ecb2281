"""Conversations as text: Hugging Face chat templates (the extra `chat`)."""

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
"""`{"role": "user", "content": "…"}`, and whatever else a template asks for."""

TEMPLATE_FILE = "chat_template.jinja"


@dataclass(frozen=True)
class TemplateLimits:
    """How much a chat template may do for one conversation.

    Steps are counted and not time, so that every machine refuses the same conversations. An
    element of a list is one or more, a filter 8, a call 32, and 64 characters that are read or
    made are one.

    Attributes:
        steps: of all that one conversation takes; 20 million take some 10 seconds.
        characters: of every text that is made on the way, and of the whole.

    Raises:
        DataError: one of them is below 1.
    """

    steps: int = field(
        default=20_000_000,
        metadata={
            "help": "steps that the template may take for a conversation",
            "flag": "--max-template-steps",
        },
    )
    characters: int = field(
        default=1 << 26,
        metadata={
            "help": "characters that a text may have which the template makes",
            "flag": "--max-template-characters",
        },
    )

    def __post_init__(self) -> None:
        if min(self.steps, self.characters) < 1:
            raise DataError(
                f"a template of {self.steps} steps and {self.characters} characters; give at "
                "least 1 of each"
            )


# What a template may make Python stumble over; a text of any size is refused before it is made.
# A lack of memory is the machine's, and no reason to refuse a conversation.
_STUMBLES = (
    TypeError,
    AttributeError,
    LookupError,
    ValueError,
    ArithmeticError,
    RecursionError,
    NameError,  # Jinja writes a number without end, as 1e999, as a name into its code
)
_CLOCK = re.compile(r"\bstrftime_now\b")
_MARKED = re.compile(r"\{%[-+]?\s*generation\b")


class RenderedConversation(NamedTuple):
    """A conversation as text.

    Attributes:
        text: what is tokenized.
        assistant_spans: first character and end of every stretch that an assistant says.
    """

    text: str
    assistant_spans: list[tuple[int, int]]


class ChatTemplate:
    """A Jinja template that makes one text of messages, rendered in a sandbox.

    Which stretches an assistant says is told by `{% generation %}` blocks, as in Hugging Face
    transformers. A template without them is rendered turn by turn: what an assistant says is what
    comes behind the generation prompt, the mark of its end included. Where that cannot be told,
    because the template writes a turn differently once another follows, it is an error.

    Args:
        source: the template. As in Hugging Face transformers, `strftime_now(format)` writes the
            local time in it, and templates of Llama 3.1 and later do so with the date.
        variables: what it may use besides `messages`, `tools` and `add_generation_prompt`: special
            tokens such as `bos_token`, or a date.
        limits: how much it may do for one conversation.
        now: the time that `strftime_now` writes; None for that of each rendering.

    Raises:
        DataError: the extra is not installed, or this is no template.
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
        self._mistake = jinja2.TemplateError
        self._begin, self._end = sandbox.BEGIN, sandbox.END
        self._marked = _MARKED.search(source) is not None
        self._budget = template_limits.Budget
        try:
            self._template = sandbox.SandboxedTemplate(source, self._whole_budget())
        except jinja2.TemplateSyntaxError as error:
            what = " ".join(str(error.message).split())
            raise DataError(f"not a chat template: line {error.lineno}: {what:.300}") from None
        # Python's own compiler refuses what is nested too deeply, and numbers of too many digits.
        except (
            *(jinja2.TemplateError, SyntaxError, ValueError, OverflowError, RecursionError),
        ) as error:
            raise DataError(f"not a chat template: {_one_line(error)}") from None

    @classmethod
    def from_prompt_format(cls, prompt_format: str) -> Self:
        """One of Megatron's prompt formats of `--sft-tokenizer-prompt-format`.

        Raises:
            DataError: there is none of this name, or it is "default", the tokenizer's own.
        """
        known = {name: each.template for name, each in PROMPT_FORMATS.items() if each.template}
        if prompt_format not in known:
            raise DataError(
                f"no prompt format {prompt_format!r}; give one of {', '.join(known)}, or load the "
                f"tokenizer's own template (Megatron: {DEFAULT_FORMAT})"
            )
        return cls(known[prompt_format])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a file of a template, or the one of a tokenizer's folder with its special tokens.

        In a folder that is `chat_template.jinja`, or else what `tokenizer_config.json` holds.

        Raises:
            DataError: there is none.
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
        if isinstance(source, list):  # several by name
            source = _default_of(source)
        if (path / TEMPLATE_FILE).is_file():
            source = read_text(path / TEMPLATE_FILE)
        if not isinstance(source, str):
            raise DataError(
                f"{path} has no chat template: neither {TEMPLATE_FILE} nor chat_template in "
                f"{CONFIG_FILE}; name a prompt format (--sft-tokenizer-prompt-format "
                f"{', '.join(name for name in PROMPT_FORMATS if name != DEFAULT_FORMAT)}; "
                "with images a --tokenizer-prompt-format that has a template, such as mistral) or "
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
        """What decides which text messages become, for `fingerprint`."""
        return [self.source, self.variables]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what decides which text messages become.

        Raises:
            DataError: a variable that is no value of JSON, so that nothing tells it from others.
        """
        try:
            content = orjson.dumps(self.record, option=orjson.OPT_SORT_KEYS)
        except TypeError as error:
            raise DataError(
                f"a variable of the chat template is no value of JSON ({error}); give text, "
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
        """Returns a conversation as text, and what of it an assistant says.

        Args:
            messages: the conversation.
            tools: what the template may tell the assistant of.
            add_generation_prompt: end with what stands before an answer, if the template has that.
            return_assistant_spans: find what an assistant says; otherwise the text is all, and
                templates that write a turn differently once another follows are no error.

        Raises:
            DataError: the template refuses the messages, or it cannot be told what an assistant
                says.
        """
        left = self._whole_budget()
        # One time for all that is rendered of a conversation, whose parts are compared.
        left.now = self.now or datetime.now()
        text = self._text(left, messages, tools, add_generation_prompt)
        if self._marked:
            return self._without_marks(text)
        if not return_assistant_spans:
            return RenderedConversation(text, [])
        said = []
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self._text(left, messages[:number], tools, add_generation_prompt=True)
            after = self._text(left, messages[: number + 1], tools)
            if not (after.startswith(before) and text.startswith(after)):
                raise DataError(
                    f"the chat template writes message {number + 1} differently when it stands "
                    "alone, so what the assistant says in it cannot be told; put {% generation %} "
                    "and {% endgeneration %} around that in the template"
                )
            said.append((len(before), len(after)))
        return RenderedConversation(text, said)

    def _whole_budget(self) -> "Budget":
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
        except self._mistake as error:
            raise DataError(f"the chat template refuses the messages: {_one_line(error)}") from None
        except _STUMBLES as error:
            raise DataError(
                f"the chat template cannot render the messages: {_one_line(error)}"
            ) from None

    def _without_marks(self, text: str) -> RenderedConversation:
        """Takes the marks of `{% generation %}` blocks out."""
        marks = [character for character in text if character in (self._begin, self._end)]
        if marks != [self._begin, self._end] * (len(marks) // 2):
            raise DataError("the messages hold U+FDD0 or U+FDD1, which no text may; remove them")
        plain, assistant_spans, length = [], [], 0
        for number, part in enumerate(re.split(f"[{self._begin}{self._end}]", text)):
            if number % 2:
                assistant_spans.append((length, length + len(part)))
            plain.append(part)
            length += len(part)
        return RenderedConversation("".join(plain), assistant_spans)

    @property
    def uses_time(self) -> bool:
        """Whether the template names `strftime_now`."""
        return _CLOCK.search(self.source) is not None

    def with_limits(self, limits: TemplateLimits) -> Self:
        """This template, allowed to do more or less."""
        made = copy(self)
        made.limits = limits
        return made

    def with_time(self, now: datetime) -> Self:
        """This template with a fixed time for `strftime_now`."""
        made = copy(self)
        made.now = now
        return made

    def __reduce__(self) -> tuple[type["ChatTemplate"], tuple[Any, ...]]:
        return type(self), (self.source, self.variables, self.limits, self.now)


def _default_of(templates: list[Any]) -> Any:
    """Returns the template named default of a list of several."""
    for entry in templates:
        match entry:
            case {"name": "default", "template": source}:
                return source
    return None


def _one_line(error: BaseException) -> str:
    """Returns what an error says, in one line that is not too long."""
    return f"{' '.join(str(error).split()) or type(error).__name__:.500}"
