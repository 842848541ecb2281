"""``megatron-infer chat``: a conversation with a model, or a text continued in turns."""

import argparse
import sys
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

    from megatron_infer.conversation import Prompts
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
        choices=("auto", "template", "chatml", "plain"),
        default="auto",
        help="template uses the chat template of the tokenizer; chatml marks turns by <|im_start|> "
        "and <|im_end|>; plain continues the text; auto uses the first of them that the tokenizer "
        "supports",
    )
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="file of a chat template [default the template of the tokenizer]",
    )
    add_sampling_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Reads lines and answers them until the input ends."""
    from megatron_infer.conversation import choose_prompts

    sampling_params(arguments)  # refuses a wrong value before the model is loaded
    loaded = load_decoder_only(arguments)
    params = sampling_params(arguments, loaded.defaults)
    prompts = choose_prompts(
        loaded.tokenizer,
        arguments.format,
        arguments.chat_template,
        special_tokens=loaded.defaults.adds_special_tokens,
    )
    conversation = Conversation(loaded, prompts, params)
    print(f"{loaded.checkpoint.path}: {prompts.description}. {HELP}.", file=sys.stderr)
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
    except InferError as error:  # the line is too long or refused; the next one may not be
        print(f"megatron-infer: error: {error}", file=sys.stderr)
        return
    print()


class Conversation:
    """A chat with a model."""

    def __init__(
        self, loaded: "LoadedModel[Tokenizer]", prompts: "Prompts", params: "SamplingParams"
    ) -> None:
        self._loaded = loaded
        self._prompts = prompts
        self._params = params

    def clear(self) -> None:
        """Starts a new conversation."""
        self._prompts.clear()

    def reply(self, line: str) -> str:
        """Adds a turn, prints the answer while it is generated, and returns it.

        If an exception such as KeyboardInterrupt ends the answer, its beginning is kept.
        """
        from megatron_infer.detokenize import TextStream
        from megatron_infer.engine.tokens import generate_tokens

        prompt = self._prompts.prompt(line, self._room())
        stream = TextStream(self._loaded.tokenizer, context=prompt)
        answer: list[int] = []
        text: list[str] = []

        def show(piece: str) -> None:
            text.append(piece)
            print(piece, end="", flush=True)

        def on_token(_: int, token: int) -> None:
            answer.append(token)
            show(stream.push(token))

        try:
            generate_tokens(
                self._loaded.model,
                [prompt],
                self._params,
                stop_tokens=self._loaded.stop_tokens | self._prompts.stop_tokens,
                on_token=on_token,
            )
            show(stream.finish())
        finally:
            self._prompts.answered(answer, "".join(text))
        return "".join(text)

    def _room(self) -> int:
        """Returns the number of tokens of a prompt that leave room for an answer."""
        positions: int = self._loaded.model.config.embedding.max_position_embeddings
        return positions - min(self._params.max_new_tokens, positions // 2)
