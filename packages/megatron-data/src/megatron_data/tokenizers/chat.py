"""Chat templates of Hugging Face, which render conversations as text (the extra `chat`)."""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from copy import copy
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import orjson

from megatron_data.errors import DataError
from megatron_data.files import read_text, tokenizer_path
from megatron_data.tokenizers.generation_blocks import (
    Blocks,
    Span,
    TemplateBudgetError,
    render_blocks,
)
from megatron_data.tokenizers.limits import TemplateLimits
from megatron_data.tokenizers.messages import Message, completed, without_null
from megatron_data.tokenizers.prompt_formats import DEFAULT_FORMAT, PROMPT_FORMATS
from megatron_data.tokenizers.protocol import CONFIG_FILE
from megatron_data.tokenizers.template_files import (
    DEFAULT,
    PROCESSOR_FILE,
    TEMPLATE_FILE,
    TOOL_USE,
    StoredTemplates,
)
from megatron_data.tokenizers.turns import find_turns

if TYPE_CHECKING:
    from megatron_data.tokenizers.sandbox import SandboxedTemplate
    from megatron_data.tokenizers.template_limits import Budget

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
    assistant_spans: list[Span]


class ChatTemplate:
    """A Jinja template that renders messages as one text, in a sandbox.

    The text is that of `apply_chat_template` of Hugging Face transformers 5.23. Keys with the value
    None are left out of a message, and `reasoning_content`, `thinking` and `reasoning` fill one
    another.

    The text of an assistant is inside `{% generation %}` blocks. A template without such blocks is
    rendered turn by turn: the text of an assistant is the text after the generation prompt,
    including the end of the turn. If it cannot be found, `render` raises an error.

    Args:
        source: The template. As in Hugging Face transformers, `strftime_now(format)` writes the
            local time. Templates of Llama 3.1 and later write the date with it.
        variables: Variables besides `messages`, `tools` and `add_generation_prompt`: special
            tokens such as `bos_token`, or a date.
        limits: Limits on the work for one conversation.
        now: The time that `strftime_now` writes. Defaults to the time of rendering if None.
        tool_source: The template of conversations with tools, which tokenizers name "tool_use".
            Defaults to `source` if None.

    Raises:
        DataError: The extra is not installed, or the source is not a template.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any] | None = None,
        limits: TemplateLimits | None = None,
        now: datetime | None = None,
        tool_source: str | None = None,
    ) -> None:
        try:
            import jinja2

            from megatron_data.tokenizers import sandbox, template_limits
        except ImportError:
            raise DataError(
                "chat templates need jinja2; pip install 'megatron-data[chat]'"
            ) from None
        self.source = source
        self.tool_source = tool_source
        self.variables = dict(variables or {})
        self.limits = limits or TemplateLimits()
        self.now = now
        self._template_error = jinja2.TemplateError
        self._limit_error = template_limits.TemplateLimitError
        self._budget = template_limits.Budget
        try:
            self._template = sandbox.SandboxedTemplate(source, self._full_budget())
            self._tool_template = self._template
            if tool_source is not None:
                self._tool_template = sandbox.SandboxedTemplate(tool_source, self._full_budget())
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

        The first of these files in a folder counts: `chat_template.jinja` with those in
        `additional_chat_templates`, `chat_template` in `tokenizer_config.json`, and
        `chat_template.json` of a processor.

        Raises:
            DataError: There is no template.
        """
        path = tokenizer_path(path)
        if path.is_file() and path.suffix == ".json":
            return cls.from_stored(StoredTemplates.read(path.parent), path.parent)
        if path.is_file():
            return cls.from_stored(StoredTemplates({DEFAULT: read_text(path)}), path)
        if not path.is_dir():
            raise DataError(f"no chat template at {path}: there is no such file or folder")
        return cls.from_stored(StoredTemplates.read(path), path)

    @classmethod
    def from_stored(cls, stored: StoredTemplates, where: object) -> Self:
        """Returns the templates of a tokenizer.

        Args:
            stored: The templates.
            where: What they belong to, for errors.

        Raises:
            DataError: There is no template for conversations without tools.
        """
        if stored.problem is not None:
            raise DataError(stored.problem)
        if DEFAULT not in stored.sources:
            names = ", ".join(stored.sources)
            others = f" (only templates named {names:.200})" if names else ""
            raise DataError(
                f"{where} has no chat template: neither {TEMPLATE_FILE} nor chat_template in "
                f"{CONFIG_FILE} or {PROCESSOR_FILE}{others}; name a prompt "
                "format (--sft-tokenizer-prompt-format "
                f"{', '.join(name for name in PROMPT_FORMATS if name != DEFAULT_FORMAT)}; "
                "with images a --tokenizer-prompt-format with a template, such as mistral) or "
                "a file (--chat-template)"
            )
        try:
            return cls(
                stored.sources[DEFAULT],
                stored.variables,
                tool_source=stored.sources.get(TOOL_USE),
            )
        except DataError as error:
            raise DataError(f"{where}: {error}") from None

    @property
    def stored(self) -> StoredTemplates:
        """The templates as a tokenizer stores them."""
        tools = {} if self.tool_source is None else {TOOL_USE: self.tool_source}
        return StoredTemplates({DEFAULT: self.source, **tools}, self.variables)

    @property
    def record(self) -> list[Any]:
        """The values that determine the rendered text, for `fingerprint`."""
        tools = [] if self.tool_source is None else [self.tool_source]
        return [self.source, self.variables, *tools]

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
        budget = self._full_budget()
        # All renderings of a conversation use one time, because they are compared.
        budget.now = self.now or datetime.now()
        messages = [completed(message) for message in messages]
        if any(message.get("content", "") is None for message in messages):
            self._text(budget, messages, tools, add_generation_prompt)  # refuses null as text
            messages = [without_null(message) for message in messages]

        def render_with(blocks: Blocks) -> str:
            budget.blocks = blocks
            return self._text(budget, messages, tools, add_generation_prompt)

        def render_turns(turns: Sequence[Message], prompt: bool) -> str:
            return self._text(budget, turns, tools, prompt)

        if self.has_generation_blocks(tools) and return_assistant_spans:
            directly = self._template_for(tools).writes_directly
            return RenderedConversation(*render_blocks(render_with, directly))
        text = self._text(budget, messages, tools, add_generation_prompt)
        spans = find_turns(render_turns, messages, text) if return_assistant_spans else []
        return RenderedConversation(text, spans)

    def has_generation_blocks(self, tools: Sequence[Mapping[str, Any]] | None = None) -> bool:
        """Returns whether the template marks the text of assistants by `{% generation %}`."""
        return _GENERATION_BLOCK.search(self._source_for(tools)) is not None

    def _source_for(self, tools: object) -> str:
        return self.source if tools is None or self.tool_source is None else self.tool_source

    def _template_for(self, tools: object) -> "SandboxedTemplate":
        return self._template if tools is None else self._tool_template

    def _full_budget(self) -> "Budget":
        return self._budget(self.limits.steps, self.limits.characters)

    def _text(
        self,
        left: "Budget",
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        try:
            return self._template_for(tools).render(
                left,
                self.variables,
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except self._limit_error as error:
            raise TemplateBudgetError(
                f"the chat template refuses the messages: {_one_line(error)}"
            ) from None
        except self._template_error as error:
            raise DataError(f"the chat template refuses the messages: {_one_line(error)}") from None
        except _RENDER_ERRORS as error:
            raise DataError(
                f"the chat template cannot render the messages: {_one_line(error)}"
            ) from None

    @property
    def uses_time(self) -> bool:
        """Whether the template uses `strftime_now`."""
        sources = (self.source, self.tool_source or "")
        return any(_STRFTIME_NOW.search(source) for source in sources)

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

    def with_variables(self, variables: Mapping[str, Any]) -> Self:
        """Returns this template with other variables."""
        template = copy(self)
        template.variables = dict(variables)
        return template

    def __reduce__(self) -> tuple[type["ChatTemplate"], tuple[Any, ...]]:
        state = self.source, self.variables, self.limits, self.now, self.tool_source
        return type(self), state


def _one_line(error: BaseException) -> str:
    """Returns the message of an error as one line of at most 500 characters."""
    return f"{' '.join(str(error).split()) or type(error).__name__:.500}"
