"""A Hugging Face tokenizer with a chat template."""

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

from megatron_data.errors import DataError
from megatron_data.files import tokenizer_path, write_json
from megatron_data.tokenizers.chat import ChatTemplate
from megatron_data.tokenizers.conversations import ConversationTokens, LossOver, with_loss_mask
from megatron_data.tokenizers.huggingface import ROLES, HuggingFaceTokenizer
from megatron_data.tokenizers.messages import Message
from megatron_data.tokenizers.plain import PLAIN_FILE
from megatron_data.tokenizers.prompt_formats import PROMPT_FORMATS, PromptFormat
from megatron_data.tokenizers.protocol import Tokenizer
from megatron_data.tokenizers.turn_ends import TurnEnds
from megatron_data.tokenizers.wrapped import WrappedTokenizer

MEGATRON_DEFAULT = "nemotron-h-aligned"
"""Megatron's default of `--sft-tokenizer-prompt-format`."""

_Name = TypeVar("_Name", bound=str)


class SFTTokenizer(WrappedTokenizer):
    """Megatron's `SFTTokenizer`: a Hugging Face tokenizer and a prompt format.

    Conversations get Megatron's tokens. The loss counts a token if the assistant wrote any of its
    characters. Megatron instead tokenizes every turn separately, refuses conversations in which a
    token spans two turns, and assumes that an answer begins after a fixed number of tokens. With
    the format "default", and since 0.19 "identity", Megatron counts every token (`loss="all"`
    here).

    Args:
        reference: The tokenizer for texts.
        template: The chat template.
        pad_token: The padding token. Defaults to that of the reference, else its end-of-text token.
    """

    def __init__(
        self,
        reference: HuggingFaceTokenizer,
        template: ChatTemplate,
        pad_token: str | None = None,
    ) -> None:
        super().__init__(reference)
        self.template = template
        self.pad_token = pad_token

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        prompt_format: str | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        special_tokens: Sequence[str] = (),
    ) -> Self:
        """Reads a tokenizer from a `tokenizer.json` or its folder, and sets the prompt format.

        Args:
            path: File or folder.
            prompt_format: One of `PROMPT_FORMATS`; "default" is the template in the folder. If
                None, `chat_template` is used, or else Megatron's default.
            chat_template: File of a chat template, instead of a prompt format.
            special_tokens: Special tokens to add.

        Raises:
            DataError: The tokenizer, format or template does not exist, or both a format and a
                template are given.
        """
        reference = load_with_special_tokens(path, special_tokens)
        if chat_template is None:
            wanted = find_prompt_format(PROMPT_FORMATS, prompt_format or MEGATRON_DEFAULT)
            return cls(reference, load_template(wanted, reference, path), wanted.pad_token)
        if prompt_format is not None:
            raise DataError("give only one of --chat-template and --sft-tokenizer-prompt-format")
        return cls(reference, add_token_variables(ChatTemplate.load(chat_template), reference))

    @property
    def pad_id(self) -> int | None:
        """The padding token, or None if it is not in the vocabulary."""
        if self.pad_token is not None:
            return self.token_id(self.pad_token)
        return self.eos_id if self.reference.pad_id is None else self.reference.pad_id

    def tokenize_conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        loss: LossOver = "assistant",
    ) -> ConversationTokens:
        """Returns the tokens of a conversation with their loss mask.

        As in Megatron, no end-of-document token is added. If a template without `{% generation %}`
        blocks ends no turn of its own, such as GLM's, the loss counts the first token of the next
        turn, which the model has to generate to stop.

        Args:
            messages: The conversation: `{"role": "user", "content": "…"}` and so on.
            tools: Tools that the template describes to the assistant.
            add_generation_prompt: Whether to end with the generation prompt.
            loss: "assistant" counts the text of assistants, "all" every token.

        Raises:
            DataError: The template refuses the messages.
        """
        rendered = self.template.render(messages, tools, add_generation_prompt, loss != "all")
        (encoded,) = self.reference.encode_with_offsets([rendered.text])
        spans = rendered.assistant_spans
        if not self.template.has_generation_blocks(tools):
            spans = self.turn_ends.closed(rendered.text, spans)
        return with_loss_mask(spans, *encoded, loss)

    @cached_property
    def turn_ends(self) -> TurnEnds:
        """The tokens that end the turns of the template."""
        return TurnEnds(self.template, self.reference)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the tokenizer, its template, and the file that `load_tokenizer` reads."""
        super().save(folder)
        self.template.stored.save(folder)
        write_json(Path(folder) / PLAIN_FILE, self._saved())

    def _saved(self) -> dict[str, Any]:
        variables = self.template.variables
        return {"type": "SFTTokenizer", "pad_token": self.pad_token, "variables": variables}


def conversation_tokenizer(
    tokenizer: Tokenizer,
    path: str | os.PathLike[str] | None = None,
    template: ChatTemplate | None = None,
) -> SFTTokenizer:
    """Returns a tokenizer with a chat template.

    Args:
        tokenizer: An `SFTTokenizer`, which is returned unchanged, or a `HuggingFaceTokenizer`,
            which gets the template in its folder (Megatron: the prompt format "default").
        path: The file of the tokenizer, or its folder, for errors.
        template: A template that replaces that of the tokenizer.

    Raises:
        DataError: The tokenizer is of another kind, or there is no template.
    """
    if isinstance(tokenizer, SFTTokenizer):
        if template is None:
            return tokenizer
        tokenizer = tokenizer.reference
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise DataError(
            f"a {type(tokenizer).__name__} has no chat template; give --tokenizer-type "
            "SFTTokenizer, MultimodalTokenizer or HuggingFaceTokenizer"
        )
    if template is None:
        where = "the tokenizer" if path is None else tokenizer_path(path)
        template = ChatTemplate.from_stored(tokenizer.templates, where)
    return SFTTokenizer(tokenizer, add_token_variables(template, tokenizer))


def load_with_special_tokens(
    path: str | os.PathLike[str], special_tokens: Sequence[str]
) -> HuggingFaceTokenizer:
    """Reads a tokenizer and adds special tokens."""
    tokenizer = HuggingFaceTokenizer.load(path)
    return tokenizer.with_special_tokens(special_tokens) if special_tokens else tokenizer


def find_prompt_format(formats: Mapping[_Name, PromptFormat], name: str) -> PromptFormat:
    """Returns the prompt format with a name.

    Raises:
        DataError: There is no such format.
    """
    for known, wanted in formats.items():
        if known == name:
            return wanted
    raise DataError(f"no prompt format {name!r}; give one of {', '.join(formats)}")


def load_template(
    wanted: PromptFormat, reference: HuggingFaceTokenizer, path: str | os.PathLike[str]
) -> ChatTemplate:
    """Returns the template of a prompt format, or else the one beside a tokenizer.

    Raises:
        DataError: There is no template.
    """
    file = tokenizer_path(path)
    folder = file if file.is_dir() else file.parent
    if wanted.template is None:
        template = ChatTemplate.load(folder)
    else:
        template = ChatTemplate(wanted.template)
    return add_token_variables(template, reference)


def add_token_variables(template: ChatTemplate, reference: HuggingFaceTokenizer) -> ChatTemplate:
    """Adds the special tokens of a tokenizer, such as `bos_token`, to a template's variables."""
    numbers = {f"{role}_token": getattr(reference, f"{role}_id") for role in ROLES}
    tokens = {name: reference.token(n) for name, n in numbers.items() if n is not None}
    return template.with_variables(tokens | template.variables)
