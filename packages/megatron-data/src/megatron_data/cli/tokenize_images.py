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
    """Adds the command and its options."""
    parser: Parser = commands.add_parser(
        "tokenize-images",
        help="write texts and their images to a multimodal dataset",
        description="Tokenize texts and write them with their images to the multimodal dataset "
        "PREFIX_image_text.bin and .idx. Each line is a document of its text and its image file. "
        "The same command resumes an interrupted run.",
    )
    data = parser.add_argument_group("input and output")
    data.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="JSON lines or Parquet with a text and the path of its image, or text files whose "
        "images have the same names; JSON lines and text files compressed as .gz, .bz2 or .zst; "
        "folders, glob patterns, URLs",
    )
    data.add_argument(
        "--input-image",
        metavar="FOLDER",
        help="folder that the paths of images are relative to; unset: the folder of each input. "
        "With text files: the folder of their images",
    )
    data.add_argument(
        "--json-keys",
        "--json-key",
        nargs=2,
        default=["text", "image"],
        metavar="KEY",
        help="keys of JSON lines, or columns, of the text and of the path of its image",
    )
    data.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="folder and name of the output"
    )
    add_tokenizer_options(parser)
    work = add_work_options(
        parser,
        "a line, a text or an image that cannot be read",
        "a larger line, row or text file",
        "",
    )
    work.add_argument(
        "--max-image-bytes",
        type=int,
        action=Bounded,
        default=MAX_DOCUMENT_BYTES,
        metavar="N",
        help="largest size of an image in bytes; a larger image counts as unreadable",
    )
    add_allow_http(work, "read images from web servers that the input names")
    work.add_argument(
        "--append-eod", action="store_true", help="end every text with the end-of-document token"
    )
    work.add_argument(
        "--pad-length",
        type=int,
        action=Bounded,
        metavar="N",
        help="truncate every text to N tokens or pad it with end-of-document tokens; needs "
        "--append-eod; unset: texts keep their lengths",
    )
    parser.set_defaults(run=partial(run, parser))


def run(parser: Parser, arguments: argparse.Namespace) -> int:
    """Writes the dataset and prints what it holds."""
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
