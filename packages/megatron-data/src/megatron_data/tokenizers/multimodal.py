"""Tokenizers for texts with images; the token `<image>` stands for an image."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias, get_args

from megatron_data.errors import DataError
from megatron_data.tokenizers.chat import ChatTemplate, RenderedConversation
from megatron_data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_data.tokenizers.messages import Message
from megatron_data.tokenizers.plain import NullTokenizer
from megatron_data.tokenizers.prompt_formats import MULTIMODAL_PROMPT_FORMATS, PromptFormat
from megatron_data.tokenizers.sft import (
    SFTTokenizer,
    add_token_variables,
    find_prompt_format,
    load_template,
    load_with_special_tokens,
)

IMAGE_TOKEN = "<image>"
"""The placeholder of an image in a text."""
IMAGE_TOKEN_ID = -200
"""Token id of `<image>` without a vocabulary; Megatron's models replace it by an image."""

ImageTag: TypeAlias = Literal["nvlm", "internvl", ""]
IMAGE_TAGS: Mapping[ImageTag, tuple[str, str]] = {
    "nvlm": ("<Image>", "</Image>"),
    "internvl": ("<img>", "</img>"),
    "": ("", ""),
}
"""Tags before and after an image, by the names of Megatron's `--image-tag-type`."""


class ImageTemplate(ChatTemplate):
    """A chat template for messages with images.

    Args:
        template: Chat template without images.
        image_tag: Kind of tags around each image.
        system: Whether a system message is rendered; otherwise a leading one is dropped.
        system_message: Replaces a leading system message, or is put before the first message.
    """

    def __init__(
        self,
        template: ChatTemplate,
        image_tag: ImageTag = "",
        system: bool = True,
        system_message: str | None = None,
    ) -> None:
        super().__init__(
            template.source,
            template.variables,
            template.limits,
            template.now,
            template.tool_source,
        )
        self.image_tag = image_tag
        self.system = system
        self.system_message = system_message

    @property
    def record(self) -> list[Any]:
        """The values that determine the rendered text, for `fingerprint`."""
        return [*super().record, self.image_tag, self.system, self.system_message]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        return_assistant_spans: bool = True,
    ) -> RenderedConversation:
        """Renders a conversation as text with tags around images; does not change the messages.

        Raises:
            DataError: A message has no text, an assistant's message has an image, or the template
                refuses the messages.
        """
        prepared = [
            self._prepared(number, message) for number, message in enumerate(messages, start=1)
        ]
        begun = bool(prepared) and prepared[0].get("role") == "system"
        if self.system_message is not None:
            first = {"role": "system", "content": self.system_message}
            prepared = [first, *prepared[begun:]]
        elif not self.system:
            prepared = prepared[begun:]
        return super().render(prepared, tools, add_generation_prompt, return_assistant_spans)

    def _prepared(self, number: int, message: Message) -> Message:
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            return message
        if not isinstance(content, str) or not content:
            raise DataError(
                f"message {number} has no text; write an image in a message as {IMAGE_TOKEN}"
            )
        if message.get("role") == "assistant" and IMAGE_TOKEN in content:
            raise DataError(
                f"message {number}: {IMAGE_TOKEN} in a message of the assistant; remove it"
            )
        return {**message, "content": add_image_tags(content, self.image_tag)}

    def __reduce__(self) -> tuple[type["ImageTemplate"], tuple[Any, ...]]:
        plain = ChatTemplate(self.source, self.variables, self.limits, self.now, self.tool_source)
        return type(self), (plain, self.image_tag, self.system, self.system_message)


class MultimodalTokenizer(SFTTokenizer):
    """Megatron's `MultimodalTokenizer`: a tokenizer for texts with images, and a prompt format.

    Texts and conversations get Megatron's tokens, without the special tokens that a tokenizer may
    put around a text. Megatron's tokenizer differs in four points: it changes the messages that it
    is given, so that a second call puts two pairs of tags around images; its loss counts the
    messages of tools; it cannot find the text of the assistant in the format "nemotron6-moe"; and
    its `vocab_size` does not include added tokens.

    Args:
        reference: The tokenizer for texts, with `<image>` among its tokens.
        template: The chat template.
        pad_token: The padding token. Defaults to that of the reference, else its end-of-text token.
    """

    template: ImageTemplate

    def __init__(
        self,
        reference: HuggingFaceTokenizer,
        template: ImageTemplate,
        pad_token: str | None = None,
    ) -> None:
        super().__init__(reference, template, pad_token)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        prompt_format: str | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        special_tokens: Sequence[str] = (IMAGE_TOKEN,),
        *,
        image_tag: ImageTag = "",
        force_system_message: bool = False,
    ) -> Self:
        """Reads a tokenizer from a `tokenizer.json` or its folder, and sets the prompt format.

        Args:
            path: File or folder.
            prompt_format: One of `MULTIMODAL_PROMPT_FORMATS`. As in Megatron there is no default.
            chat_template: File of a chat template, instead of a prompt format. A leading system
                message is then rendered, and the padding token is that of the reference.
            special_tokens: Special tokens to add.
            image_tag: Tags around images: "nvlm" for `<Image>`, "internvl" for `<img>`.
            force_system_message: Whether every conversation begins with the system message of the
                prompt format.

        Raises:
            DataError: The tokenizer or template is missing, the format or tag is unknown, both a
                format and a template are given, or the format has no system message to force.
        """
        if (prompt_format is None) == (chat_template is None):
            raise DataError(
                "a MultimodalTokenizer needs either --tokenizer-prompt-format or --chat-template; "
                "give one of them"
            )
        wanted = PromptFormat()
        if prompt_format is not None:
            wanted = find_prompt_format(MULTIMODAL_PROMPT_FORMATS, prompt_format)
        if image_tag not in get_args(ImageTag):
            raise DataError(f"unknown image tag {image_tag!r}; give nvlm, internvl or none")
        if force_system_message and wanted.system_message is None:
            which = chat_template if prompt_format is None else f"the prompt format {prompt_format}"
            raise DataError(
                f"--force-system-message: {which} has no system message; use the prompt format "
                "qwen2p0 or qwen2p5"
            )
        reference = load_with_special_tokens(path, special_tokens)
        if chat_template is None:
            plain = load_template(wanted, reference, path)
        else:
            plain = add_token_variables(ChatTemplate.load(chat_template), reference)
        template = ImageTemplate(
            plain,
            image_tag,
            wanted.system,
            wanted.system_message if force_system_message else None,
        )
        return cls(reference, template, wanted.pad_token)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the reference, combined with the image tag if there is one."""
        if not self.template.image_tag:
            return self.reference.fingerprint
        both = f"{self.reference.fingerprint} {self.template.image_tag}"
        return f"sha256:{hashlib.sha256(both.encode()).hexdigest()}"

    @property
    def image_id(self) -> int | None:
        """The token id of `<image>`, or None if it is not in the vocabulary."""
        return self.token_id(IMAGE_TOKEN)

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, with tags around images."""
        return super().encode(add_image_tags(text, self.template.image_tag))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of several texts, with tags around images."""
        return super().encode_batch(
            [add_image_tags(text, self.template.image_tag) for text in texts]
        )

    def split_text(self, text: str) -> Iterator[str]:
        """Splits a text; yields it whole if images get tags, because a split could cut a tag."""
        return iter((text,)) if self.template.image_tag else super().split_text(text)

    def _saved(self) -> dict[str, Any]:
        template = self.template
        options = {name: getattr(template, name) for name in ("system", "system_message")}
        options |= {"image_tag": template.image_tag}
        return {**super()._saved(), "type": "MultimodalTokenizer", "options": options}


class NullMultimodalTokenizer(NullTokenizer):
    """Megatron's `NullMultimodalTokenizer`: reads token ids as text; `<image>` has the id -200.

    Args:
        vocab_size: Number of token ids without the end-of-document token.
    """

    image_id = IMAGE_TOKEN_ID

    def token_id(self, token: str) -> int:
        """Returns the id of a token: the token read as a number, or -200 for `<image>`.

        Raises:
            DataError: The token is not a single number below `vocab_size`.
        """
        if token == IMAGE_TOKEN:
            return self.image_id
        numbers = self.encode(token)
        if len(numbers) != 1:
            raise DataError(f"{token!r} is {len(numbers)} tokens; give exactly one")
        return numbers[0]


def add_image_tags(text: str, image_tag: ImageTag) -> str:
    """Returns a text with tags around its images."""
    before, behind = IMAGE_TAGS[image_tag]
    return text.replace(IMAGE_TOKEN, f"{before}{IMAGE_TOKEN}{behind}")
