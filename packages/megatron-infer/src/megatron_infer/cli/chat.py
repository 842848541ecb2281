"""``megatron-infer chat``: a conversation with a model, or a text continued in turns."""

import argparse
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_infer._command import Parser
from megatron_infer.cli.options import (
    add_model_options,
    add_sampling_options,
    load_decoder_only,
    sampling_params,
)
from megatron_infer.errors import InferError

if TYPE_CHECKING:
    from megatron_data import Tokenizer

    from megatron_infer.load import LoadedModel
    from megatron_infer.params import SamplingParams

HELP = "/new starts a new conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer"


def add_parser(commands: Any) -> None:
    """Adds the command ``chat``."""
    parser: Parser = commands.add_parser(
        "chat",
        help="chat with the model of a checkpoint in the terminal",
        description="Chat with the model of a checkpoint in the terminal. The answer to each line "
        "is printed while it is generated. Earlier turns stay in the context as far as the "
        f"positions of the model allow. {HELP}.",
    )
    parser.set_defaults(run=run)
    add_model_options(parser)
    parser.add_argument(
        "--format",
        choices=("auto", "chatml", "plain"),
        default="auto",
        help="chatml marks turns as instruction-tuned models expect; plain continues the text; "
        "auto uses chatml if the tokenizer has <|im_start|>",
    )
    add_sampling_options(parser)


@dataclass(frozen=True)
class Format:
    """The text around a user's turn. ``end`` closes the model's turn and ends its generation."""

    prefix: str
    suffix: str
    end: str | None


CHATML = Format("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>")
PLAIN = Format("", "", None)


def run(arguments: argparse.Namespace) -> int:
    """Reads lines and answers them until the input ends."""
    sampling_params(arguments)  # refuses a wrong value before the model is loaded
    loaded = load_decoder_only(arguments)
    params = sampling_params(arguments, loaded.defaults)
    chosen = choose_format(arguments.format, loaded.tokenizer)
    conversation = Conversation(loaded, chosen, params)
    kind = "turns are marked as in ChatML" if chosen is CHATML else "the text is continued"
    print(f"{loaded.checkpoint.path}: {kind}. {HELP}.", file=sys.stderr)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            if sys.stdin.isatty():
                print()
            return 0
        match line.strip():
            case "":
                continue
            case "/quit":
                return 0
            case "/new":
                conversation.clear()
            case command if command.startswith("/") and " " not in command:
                print(f"{command}: {HELP}", file=sys.stderr)
            case _:
                _answer(conversation, line)


def _answer(conversation: "Conversation", line: str) -> None:
    """Prints the answer to a line; Ctrl-C ends the answer but not the program."""
    try:
        conversation.reply(line)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except InferError as error:  # the line is too long; the next one may be shorter
        print(f"megatron-infer: error: {error}", file=sys.stderr)
        return
    print(flush=True)


def choose_format(name: str, tokenizer: "Tokenizer") -> Format:
    """Returns the format that ``--format`` selects.

    Raises:
        InferError: The tokenizer does not have the tokens of the format.
    """
    knows = all(len(tokenizer.encode(mark)) == 1 for mark in ("<|im_start|>", "<|im_end|>"))
    if name == "chatml" and not knows:
        raise InferError(
            "--format chatml: the tokenizer has no <|im_start|> and <|im_end|>; use --format plain"
        )
    return CHATML if knows and name != "plain" else PLAIN


class Conversation:
    """The tokens of a conversation so far, and the model that continues it."""

    def __init__(
        self, loaded: "LoadedModel[Tokenizer]", chosen: Format, params: "SamplingParams"
    ) -> None:
        self._loaded = loaded
        self._format = chosen
        self._params = params
        self._tokens: list[int] = []

    def clear(self) -> None:
        """Starts a new conversation."""
        self._tokens = []

    def reply(self, line: str) -> str:
        """Adds a turn, prints the answer while it is generated, and returns it.

        If an exception such as KeyboardInterrupt ends the answer, the tokens so far are kept.
        """
        from megatron_infer.detokenize import TextStream
        from megatron_infer.engine.tokens import generate_tokens

        tokenizer, form = self._loaded.tokenizer, self._format
        new = tokenizer.encode(form.prefix + line + form.suffix)
        prompt = self._in_view(new)
        stream = TextStream(tokenizer, context=prompt)
        answer, text = [], []

        def show(piece: str) -> None:
            text.append(piece)
            print(piece, end="", flush=True)

        def on_token(_: int, token: int) -> None:
            answer.append(token)
            show(stream.push(token))

        end = tokenizer.encode(form.end) if form.end else []
        try:
            generate_tokens(
                self._loaded.model,
                [prompt],
                self._params,
                stop_tokens=self._loaded.stop_tokens | frozenset(end),
                on_token=on_token,
            )
        finally:
            closing = tokenizer.encode(f"{form.end}\n") if form.end else []
            self._tokens = [*prompt, *answer, *closing]
        show(stream.finish())
        return "".join(text)

    def _in_view(self, new: list[int]) -> list[int]:
        """Returns the latest tokens that leave room for an answer."""
        positions = self._loaded.model.config.embedding.max_position_embeddings
        room = positions - min(self._params.max_new_tokens, positions // 2)
        if len(new) > room:
            raise InferError(
                f"the line has {len(new)} tokens, but only {room} fit beside an answer; write a "
                "shorter line"
            )
        kept = max(0, room - len(new))
        earlier = self._tokens[-kept:] if kept else []
        return [*earlier, *new]
