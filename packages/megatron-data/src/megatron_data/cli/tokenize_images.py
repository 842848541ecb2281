"""`megatron-data tokenize-images`."""

import argparse
from functools import partial
from typing import Any

from megatron_data._command import Parser
from megatron_data.cli.bounds import Bounded
from megatron_data.cli.options import add_allow_http, add_tokenizer_options, tokenizer_from
from megatron_data.cli.work import add_work_options, print_resumed, print_skipped
from megatron_data.plural import plural
from megatron_data.sources.protocol import MAX_DOCUMENT_BYTES


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser: Parser = commands.add_parser(
        "tokenize-images",
        help="put tokenized texts and their images together",
        description="Tokenize texts and put them beside their images into the multimodal dataset "
        "PREFIX_image_text.bin and .idx: each line a document of its text and its image file. A "
        "run that was ended goes on where it was when the same command is given again.",
    )
    data = parser.add_argument_group("input and output")
    data.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="JSON lines or Parquet with the text and the path of its image, or text files whose "
        "images have their names; .gz, .bz2 and .zst of lines and texts; folders, patterns, URLs",
    )
    data.add_argument(
        "--input-image",
        metavar="FOLDER",
        help="below which the paths of images are; unset: the folder of each input. With text "
        "files: what holds their images",
    )
    data.add_argument(
        "--json-keys",
        "--json-key",
        nargs=2,
        default=["text", "image"],
        metavar="KEY",
        help="keys of JSON lines, or columns: of the text, and of the path of its image",
    )
    data.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path and name")
    add_tokenizer_options(parser)
    work = add_work_options(
        parser,
        "a line, a text or an image that cannot be read",
        "a longer line, row or text file",
        "",
    )
    work.add_argument(
        "--max-image-bytes",
        type=int,
        action=Bounded,
        default=MAX_DOCUMENT_BYTES,
        metavar="N",
        help="a larger image is one that cannot be read",
    )
    add_allow_http(work, "read images on web servers, where lines name them")
    work.add_argument(
        "--append-eod", action="store_true", help="end every text with the end-of-document token"
    )
    work.add_argument(
        "--pad-length",
        type=int,
        action=Bounded,
        metavar="N",
        help="cut every text to N tokens, or fill it up with end-of-document tokens, for which it "
        "needs --append-eod; unset: leave it as it is",
    )
    parser.set_defaults(run=partial(run, parser))


def run(parser: Parser, arguments: argparse.Namespace) -> int:
    """Writes the dataset and says what is in it."""
    from megatron_data.preprocessing.image_pairs import tokenize_image_pairs

    report = tokenize_image_pairs(
        arguments.input,
        arguments.output_prefix,
        tokenizer_from(parser, arguments),
        json_keys=tuple(arguments.json_keys),
        image_folder=arguments.input_image,
        append_eod=arguments.append_eod,
        pad_length=arguments.pad_length,
        workers=arguments.workers,
        on_error=arguments.on_error,
        max_document_bytes=arguments.max_document_bytes,
        max_image_bytes=arguments.max_image_bytes,
        allow_http=arguments.allow_http,
        progress=True,
        overwrite=arguments.overwrite,
    )
    print_resumed(report.dataset)
    print(
        f"{report.prefix}: {plural(report.pairs, 'pair')}, {plural(report.tokens, 'token')}, "
        f"{report.image_bytes / 1e6:.1f} MB of images; "
        f"{plural(report.truncated, 'text')} truncated"
    )
    print_skipped(report.dataset, arguments)
    return 0
