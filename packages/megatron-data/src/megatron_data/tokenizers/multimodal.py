"""Tokenizers of texts with images: in a text, an image is the token `<image>`."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias, get_args

from megatron_data.errors import DataError
from megatron_data.tokenizers.chat import ChatTemplate, Message, RenderedConversation
from megatron_data.tokenizers.huggingface import HuggingFaceTokenizer
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
"""What stands for an image in a text."""
IMAGE_TOKEN_ID = -200
"""Number of `<image>` where no vocabulary has it; Megatron's models put an image there."""

ImageTag: TypeAlias = Literal["nvlm", "internvl", ""]
IMAGE_TAGS: Mapping[ImageTag, tuple[str, str]] = {
    "nvlm": ("<Image>", "</Image>"),
    "internvl": ("<img>", "</img>"),
    "": ("", ""),
}
"""What stands before and behind an image, by the names of Megatron's `--image-tag-type`."""


class ImageTemplate(ChatTemplate):
    """A chat template for messages with images in them.

    Args:
        template: from messages to text.
        image_tag: what stands before and behind every image.
        system: whether system messages have a turn; otherwise the first is left out.
        system_message: what is said in place of a first system message, or before all others.
    """

    def __init__(
        self,
        template: ChatTemplate,
        image_tag: ImageTag = "",
        system: bool = True,
        system_message: str | None = None,
    ) -> None:
        super().__init__(template.source, template.variables, template.limits, template.now)
        self.image_tag = image_tag
        self.system = system
        self.system_message = system_message

    @property
    def record(self) -> list[Any]:
        """What decides which text messages become, for `fingerprint`."""
        return [*super().record, self.image_tag, self.system, self.system_message]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        return_assistant_spans: bool = True,
    ) -> RenderedConversation:
        """Returns a conversation as text, images between tags; the messages stay as they are.

        Raises:
            DataError: a message without text, an image in what an assistant says, or messages
                that the template refuses.
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
                f"message {number} has no text; an image in a message is written {IMAGE_TOKEN}"
            )
        if message.get("role") == "assistant" and IMAGE_TOKEN in content:
            raise DataError(f"message {number}: {IMAGE_TOKEN} in what an assistant says")
        return {**message, "content": add_image_tags(content, self.image_tag)}

    def __reduce__(self) -> tuple[type["ImageTemplate"], tuple[Any, ...]]:
        plain = ChatTemplate(self.source, self.variables, self.limits, self.now)
        return type(self), (plain, self.image_tag, self.system, self.system_message)


class MultimodalTokenizer(SFTTokenizer):
    """Megatron's tokenizer of this name: images in texts, and a prompt format.

    Texts and conversations get Megatron's tokens, without the special tokens that a tokenizer may
    put around a text. It writes into the messages it is given, so that a second time images have
    two pairs of tags; counts what tools say; cannot tell what assistants say in the format
    "nemotron6-moe"; and leaves the added tokens out of its `vocab_size`. Here it is otherwise.

    Args:
        reference: the tokenizer of texts, `<image>` among its tokens.
        template: from messages to text.
        pad_token: token that fills a batch; None for the reference's, or else its end of text.
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
        """Reads a `tokenizer.json` or its folder, and says how conversations are written.

        Args:
            path: file or folder.
            prompt_format: one of `MULTIMODAL_PROMPT_FORMATS`; unlike `SFTTokenizer` it has no
                default, in Megatron neither.
            chat_template: file of another template, in place of a format. A first system message
                has its turn then, and no token fills batches but the reference's.
            special_tokens: tokens that are kept whole.
            image_tag: what stands around images: "nvlm" `<Image>`, "internvl" `<img>`.
            force_system_message: let every conversation begin with the format's system message.

        Raises:
            DataError: no tokenizer, no such format or tag, no template, a format and a template,
                or a format without a system message that was to be forced.
        """
        if (prompt_format is None) == (chat_template is None):
            raise DataError(
                "--tokenizer-prompt-format and --chat-template: give one of them to a "
                "MultimodalTokenizer"
            )
        wanted = PromptFormat()
        if prompt_format is not None:
            wanted = find_prompt_format(MULTIMODAL_PROMPT_FORMATS, prompt_format)
        if image_tag not in get_args(ImageTag):
            raise DataError(f"image tag {image_tag!r}; give one of nvlm, internvl, or none")
        if force_system_message and wanted.system_message is None:
            which = chat_template if prompt_format is None else f"the prompt format {prompt_format}"
            raise DataError(
                f"--force-system-message: {which} has no system message to force; qwen2p0 and "
                "qwen2p5 have"
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
        """That of the reference, and with tags one of both."""
        if not self.template.image_tag:
            return self.reference.fingerprint
        both = f"{self.reference.fingerprint} {self.template.image_tag}"
        return f"sha256:{hashlib.sha256(both.encode()).hexdigest()}"

    @property
    def image_id(self) -> int | None:
        """Token of an image, or None where `<image>` was not among the special tokens."""
        return self.token_id(IMAGE_TOKEN)

    def encode(self, text: str) -> list[int]:
        """Token numbers of a text, with tags around images."""
        return super().encode(add_image_tags(text, self.template.image_tag))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts."""
        return super().encode_batch(
            [add_image_tags(text, self.template.image_tag) for text in texts]
        )

    def split_text(self, text: str) -> Iterator[str]:
        """Returns the text whole where tags are put into it, which a cut could lose."""
        return iter((text,)) if self.template.image_tag else super().split_text(text)

    def _saved(self) -> dict[str, Any]:
        template = self.template
        options = {name: getattr(template, name) for name in ("system", "system_message")}
        options |= {"image_tag": template.image_tag}
        return {**super()._saved(), "type": "MultimodalTokenizer", "options": options}


class NullMultimodalTokenizer(NullTokenizer):
    """Text that already is token numbers; an image's token has the number -200.

    Megatron's tokenizer of the same name.

    Args:
        vocab_size: how many numbers there are without the end of a document.
    """

    image_id = IMAGE_TOKEN_ID

    def token_id(self, token: str) -> int:
        """Returns the number of a token: itself, or -200 for `<image>`.

        Raises:
            DataError: not one number below `vocab_size`.
        """
        if token == IMAGE_TOKEN:
            return self.image_id
        numbers = self.encode(token)
        if len(numbers) != 1:
            raise DataError(f"a token's number is that of one token; {token!r} is {len(numbers)}")
        return numbers[0]


def add_image_tags(text: str, image_tag: ImageTag) -> str:
    """Returns a text with tags around its images."""
    before, behind = IMAGE_TAGS[image_tag]
    return text.replace(IMAGE_TOKEN, f"{before}{IMAGE_TOKEN}{behind}")
