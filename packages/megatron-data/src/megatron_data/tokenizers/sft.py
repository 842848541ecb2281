"""A Hugging Face tokenizer that knows how conversations are written."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from megatron_data.errors import DataError
from megatron_data.files import AtomicFile, tokenizer_path, write_json
from megatron_data.tokenizers.chat import TEMPLATE_FILE, ChatTemplate, Message
from megatron_data.tokenizers.conversations import ConversationTokens, LossOver, with_loss_mask
from megatron_data.tokenizers.huggingface import ROLES, HuggingFaceTokenizer
from megatron_data.tokenizers.plain import PLAIN_FILE
from megatron_data.tokenizers.prompt_formats import PROMPT_FORMATS, PromptFormat
from megatron_data.tokenizers.protocol import Tokenizer
from megatron_data.tokenizers.wrapped import WrappedTokenizer

MEGATRON_DEFAULT = "nemotron-h-aligned"
"""What Megatron takes where no `--sft-tokenizer-prompt-format` is given."""

_Name = TypeVar("_Name", bound=str)


class SFTTokenizer(WrappedTokenizer):
    """Megatron's tokenizer of this name: one of Hugging Face's, and a prompt format.

    Conversations get Megatron's tokens. What the loss counts is told by the characters that an
    assistant says. Megatron tokenizes every turn anew, refuses conversations in which a token
    reaches from one turn into the next, and takes an answer to begin behind a fixed number of
    tokens, whatever the vocabulary; with the format "default" it counts everything (`loss="all"`).

    Args:
        reference: the tokenizer of texts.
        template: from messages to text.
        pad_token: token that fills a batch; None for the reference's, or else its end of text.
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
        """Reads a `tokenizer.json` or its folder, and says how conversations are written.

        Args:
            path: file or folder.
            prompt_format: one of `PROMPT_FORMATS`, of which "default" is the template in the
                folder; None takes `chat_template`, or else Megatron's default.
            chat_template: file of another template.
            special_tokens: more tokens that are kept whole.

        Raises:
            DataError: no tokenizer, no such format, or no template.
        """
        reference = load_with_special_tokens(path, special_tokens)
        if chat_template is None:
            wanted = find_prompt_format(PROMPT_FORMATS, prompt_format or MEGATRON_DEFAULT)
            return cls(reference, load_template(wanted, reference, path), wanted.pad_token)
        if prompt_format is not None:
            raise DataError("--chat-template and --sft-tokenizer-prompt-format: give one of them")
        return cls(reference, add_token_variables(ChatTemplate.load(chat_template), reference))

    @property
    def pad_id(self) -> int | None:
        """Token that fills a batch, or None where the vocabulary lacks it."""
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
        """Tokens of a conversation, and which of them the loss counts.

        No end-of-document token is added, as in Megatron.

        Args:
            messages: `{"role": "user", "content": "…"}` and so on.
            tools: what the template may tell the assistant of.
            add_generation_prompt: end with what stands before an answer.
            loss: "assistant" counts what assistants say, "all" every token.

        Raises:
            DataError: the template refuses the messages.
        """
        rendered = self.template.render(messages, tools, add_generation_prompt, loss != "all")
        (encoded,) = self.reference.encode_with_offsets([rendered.text])
        return with_loss_mask(rendered.assistant_spans, *encoded, loss)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the tokenizer, its template beside it, and what `load_tokenizer` reads of both."""
        super().save(folder)
        with AtomicFile(Path(folder) / TEMPLATE_FILE) as file:
            file.write(self.template.source.encode())
        write_json(Path(folder) / PLAIN_FILE, self._saved())

    def _saved(self) -> dict[str, Any]:
        variables = self.template.variables
        return {"type": "SFTTokenizer", "pad_token": self.pad_token, "variables": variables}


def conversation_tokenizer(tokenizer: Tokenizer, path: str | os.PathLike[str]) -> SFTTokenizer:
    """Returns a tokenizer that knows how conversations are written.

    Args:
        tokenizer: one that does, or a `HuggingFaceTokenizer`, which takes the template that lies
            beside it (Megatron: the prompt format "default").
        path: the file that it was read from, or its folder.

    Raises:
        DataError: another kind, or there is no template.
    """
    if isinstance(tokenizer, SFTTokenizer):
        return tokenizer
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise DataError(
            f"a {type(tokenizer).__name__} does not know how conversations are written; give "
            "--tokenizer-type SFTTokenizer, MultimodalTokenizer or HuggingFaceTokenizer"
        )
    return SFTTokenizer(tokenizer, load_template(PromptFormat(), tokenizer, path))


def load_with_special_tokens(
    path: str | os.PathLike[str], special_tokens: Sequence[str]
) -> HuggingFaceTokenizer:
    """Reads a tokenizer, and adds tokens that are kept whole."""
    tokenizer = HuggingFaceTokenizer.load(path)
    return tokenizer.with_special_tokens(special_tokens) if special_tokens else tokenizer


def find_prompt_format(formats: Mapping[_Name, PromptFormat], name: str) -> PromptFormat:
    """Returns the prompt format of a name.

    Raises:
        DataError: there is none.
    """
    for known, wanted in formats.items():
        if known == name:
            return wanted
    raise DataError(f"no prompt format {name!r}; give one of {', '.join(formats)}")


def load_template(
    wanted: PromptFormat, reference: HuggingFaceTokenizer, path: str | os.PathLike[str]
) -> ChatTemplate:
    """Returns a prompt format's template, or the one that lies beside a tokenizer.

    Raises:
        DataError: there is none.
    """
    place = tokenizer_path(path)
    folder = place if place.is_dir() else place.parent
    if wanted.template is None:
        template = ChatTemplate.load(folder)
    else:
        template = ChatTemplate(wanted.template)
    return add_token_variables(template, reference)


def add_token_variables(template: ChatTemplate, reference: HuggingFaceTokenizer) -> ChatTemplate:
    """Returns a template that may name a tokenizer's special tokens, such as `bos_token`."""
    numbers = {f"{role}_token": getattr(reference, f"{role}_id") for role in ROLES}
    tokens = {name: reference.token(n) for name, n in numbers.items() if n is not None}
    return ChatTemplate(template.source, tokens | template.variables)
