"""The tokens that end the turns of a chat template."""

from collections.abc import Sequence

from megatron_data.errors import DataError
from megatron_data.tokenizers.chat import ChatTemplate
from megatron_data.tokenizers.generation_blocks import Span
from megatron_data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_data.tokenizers.messages import Message
from megatron_data.tokenizers.prompt_formats import PROMPT_FORMATS
from megatron_data.tokenizers.turns import ASSISTANT

_MARK = "\ufdd0"
_SYSTEM, _USER = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
_ANSWER = {"role": ASSISTANT, "content": _MARK}
_LAST = ([_USER, _ANSWER], [_SYSTEM, _USER, _ANSWER], [_ANSWER])
_FOLLOWED = ([_USER, _ANSWER, _USER], [_SYSTEM, _USER, _ANSWER, _USER])


class TurnEnds:
    """How a template ends the turns of assistants, with the added tokens of a tokenizer.

    Attributes:
        token: The token after an answer, such as `<|im_end|>`, or None if the template writes
            none. With templates that write no end, such as GLM's, it is the first token of the next
            turn, `<|user|>`.
        stop: The token that ends a generated answer: the one after the last answer of a
            conversation, such as gpt-oss's `<|return|>`, or else `token`.
        last_is_open: Whether the last answer of a conversation has no end, because only the next
            turn would write it.

    Args:
        template: The template.
        tokenizer: The tokenizer.
    """

    def __init__(self, template: ChatTemplate, tokenizer: HuggingFaceTokenizer) -> None:
        starts = (
            None if tokenizer.bos_id in (tokenizer.eos_id, tokenizer.eod_id) else (tokenizer.bos_id)
        )
        added = tokenizer.added_tokens.items()
        self._tokens = tuple(text for text, number in added if text.strip() and number != starts)
        self._eod_id = tokenizer.eod_id
        self._megatron = template.source in {each.template for each in PROMPT_FORMATS.values()}
        last = self._token_of(template, _LAST)
        self.token = self._token_of(template, _FOLLOWED) or last
        self.stop = last or self.token
        self.last_is_open = not self._megatron and last is None and self.token is not None

    def _token_of(self, template: ChatTemplate, talks: Sequence[Sequence[Message]]) -> str | None:
        """Returns the token after an answer in the first conversation that is accepted."""
        for talk in talks:
            try:
                text = template.render(talk, return_assistant_spans=False).text
            except DataError:  # the template wants other messages
                continue
            return self._leading(text.partition(_MARK)[2].lstrip())
        return None

    def _leading(self, text: str) -> str | None:
        """Returns the longest added token at the beginning of a text."""
        if not text.startswith(self._tokens):
            return None
        return max((each for each in self._tokens if text.startswith(each)), key=len)

    def closed(self, text: str, spans: Sequence[Span]) -> list[Span]:
        """Returns the spans of answers, each with the token after it if it has no end of its own.

        Args:
            text: The text of a conversation.
            spans: Spans of a template without `{% generation %}` blocks.
        """
        closed = []
        for first, last in spans:
            if not text[first:last].rstrip().endswith(self._tokens):
                rest = text[last:]
                space = len(rest) - len(rest.lstrip())
                last += space + len(token) if (token := self._leading(rest[space:])) else 0
            closed.append((first, last))
        return closed

    def missing(self, text: str) -> int | None:
        """Returns the end-of-document token if a conversation needs it after its text, or None.

        Megatron's prompt formats get it, as in Megatron. With another template it is appended only
        if neither the template's turns nor this conversation end in a token.
        """
        ended = self.token is not None or text.rstrip().endswith(self._tokens)
        return self._eod_id if self._megatron or not ended else None
