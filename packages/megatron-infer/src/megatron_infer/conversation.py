"""Prompts of a chat: a conversation in a chat template, or one text."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from megatron_data import DataError, Tokenizer
from megatron_data.tokenizers import (
    ChatTemplate,
    HuggingFaceTokenizer,
    SFTTokenizer,
    conversation_tokenizer,
)

from megatron_infer.errors import InferError

ChatFormat: TypeAlias = Literal["auto", "template", "chatml", "plain"]

CHATML = """\
{% for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{% endfor %}
{% if add_generation_prompt %}{{- '<|im_start|>assistant\\n' -}}{% endif %}"""
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")


@runtime_checkable
class Prompts(Protocol):
    """The prompts of a chat, which grows by a line of the user and an answer at a time.

    Attributes:
        description: What a turn looks like.
        stop_tokens: Tokens that end an answer, besides those of the model.
    """

    description: str
    stop_tokens: frozenset[int]

    def clear(self) -> None:
        """Starts a new conversation."""

    def prompt(self, line: str, room: int) -> list[int]:
        """Adds a line of the user and returns a prompt of at most ``room`` tokens.

        Raises:
            InferError: The line is too long, or the template refuses it. Nothing is added.
        """

    def answered(self, tokens: list[int], text: str) -> None:
        """Adds the answer to the last prompt."""


class TemplatePrompts:
    """A conversation in a chat template. Its oldest turns are dropped if it becomes too long."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        stop_tokens: frozenset[int],
        description: str,
    ) -> None:
        self.description = description
        self.stop_tokens = stop_tokens
        self._tokenizer = tokenizer
        self._template = template
        self._messages: list[Mapping[str, Any]] = []

    def clear(self) -> None:
        """Starts a new conversation."""
        self._messages = []

    def prompt(self, line: str, room: int) -> list[int]:
        """Renders the conversation with another line of the user."""
        messages = [*self._messages, {"role": "user", "content": line}]
        while True:
            try:
                text = self._template.render(
                    messages, add_generation_prompt=True, return_assistant_spans=False
                ).text
            except DataError as error:
                raise InferError(str(error)) from None
            tokens = self._tokenizer.encode(text)
            if len(tokens) <= room:
                self._messages = messages
                return tokens
            if len(messages) == 1:
                raise InferError(_too_long(len(tokens), room))
            messages = messages[2:]

    def answered(self, tokens: list[int], text: str) -> None:
        """Adds the answer as a message of the assistant."""
        self._messages.append({"role": "assistant", "content": text})


class TextPrompts:
    """One text, whose first tokens are dropped if it becomes too long.

    Args:
        tokenizer: The tokenizer of the model.
        start: Tokens before a new text, such as the begin-of-text token. Defaults to none.
    """

    description = "the text is continued"
    stop_tokens: frozenset[int] = frozenset()

    def __init__(self, tokenizer: Tokenizer, start: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._start = start
        self._tokens: list[int] = []

    def clear(self) -> None:
        """Starts a new text."""
        self._tokens = []

    def prompt(self, line: str, room: int) -> list[int]:
        """Appends a line to the text."""
        new = self._tokenizer.encode(line)
        if not self._tokens:
            new = [*self._start, *new]
        if len(new) > room:
            raise InferError(_too_long(len(new), room))
        kept = room - len(new)
        self._tokens = [*(self._tokens[-kept:] if kept else []), *new]
        return list(self._tokens)

    def answered(self, tokens: list[int], text: str) -> None:
        """Appends the tokens of the answer."""
        self._tokens += tokens


def choose_prompts(
    tokenizer: Tokenizer,
    wanted: ChatFormat = "auto",
    template_file: str | None = None,
    *,
    special_tokens: bool = False,
) -> Prompts:
    """Returns the prompts of a chat.

    Args:
        tokenizer: The tokenizer of the model.
        wanted: "template" uses the chat template of the tokenizer, "chatml" marks turns as in
            ChatML, "plain" continues one text. "auto" is the first of them that is possible.
        template_file: File of a chat template that replaces the tokenizer's.
        special_tokens: Whether a plain text starts with the tokens that the tokenizer adds before
            a text, such as ``<s>``. Defaults to False.

    Raises:
        InferError: The tokenizer has no template or not the tokens of ChatML.
        DataError: The template is invalid.
    """
    if template_file is not None:
        if wanted in ("chatml", "plain"):
            raise InferError(f"give only one of --chat-template and --format {wanted}")
        where = f"turns are written by the chat template {template_file}"
        return _by_template(tokenizer, ChatTemplate.load(template_file), where)
    if wanted in ("auto", "template") and _has_template(tokenizer):
        return _by_template(tokenizer, None, "turns are written by the tokenizer's chat template")
    if wanted == "template":
        raise InferError(
            "--format template: the tokenizer has no chat template; give one with --chat-template, "
            "or use --format chatml or plain"
        )
    ends = [tokenizer.encode(mark) for mark in _CHATML_TOKENS]
    knows = all(len(tokens) == 1 for tokens in ends)
    if wanted == "chatml" and not knows:
        raise InferError(
            "--format chatml: the tokenizer has no <|im_start|> and <|im_end|>; use --format plain"
        )
    if not knows or wanted == "plain":
        if special_tokens and isinstance(tokenizer, HuggingFaceTokenizer):
            return TextPrompts(tokenizer, tokenizer.text_edges[0])
        return TextPrompts(tokenizer)
    why = "" if wanted == "chatml" else "the tokenizer has no chat template, and "
    stop = frozenset(ends[1])
    return TemplatePrompts(
        tokenizer, ChatTemplate(CHATML), stop, f"{why}turns are marked as in ChatML"
    )


def _has_template(tokenizer: Tokenizer) -> bool:
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return bool(tokenizer.templates.sources) or tokenizer.templates.problem is not None
    return isinstance(tokenizer, SFTTokenizer)


def _by_template(
    tokenizer: Tokenizer, template: ChatTemplate | None, description: str
) -> TemplatePrompts:
    """Returns prompts in a template; in that of the tokenizer if it is None."""
    if template is None:
        talks = conversation_tokenizer(tokenizer)
    else:
        talks = conversation_tokenizer(tokenizer, template=template)
    stop = talks.turn_ends.stop
    number = None if stop is None else talks.token_id(stop)
    ends = frozenset() if number is None else frozenset({number})
    return TemplatePrompts(talks, talks.template, ends, description)


def _too_long(tokens: int, room: int) -> str:
    return (
        f"the line has {tokens} tokens, but only {room} fit beside an answer; write a shorter line"
    )
