"""`megatron-data preprocess`."""

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_data._command import Parser
from megatron_data.cli.options import INPUT_HELP, add_tokenizer_options, tokenizer_from
from megatron_data.cli.work import add_work_options, print_resumed, print_skipped
from megatron_data.plural import plural

if TYPE_CHECKING:
    from megatron_data.preprocessing.sentences import SentenceSplitter


SPLITTERS = ("punkt", "nltk")


def add_parser(commands: Any) -> None:
    """Adds the command and its options."""
    parser: Parser = commands.add_parser(
        "preprocess",
        help="tokenize text into .bin/.idx",
        description="Tokenize text into PREFIX_KEY_document.bin and .idx (with --split-sentences "
        "PREFIX_KEY_sentence), which Megatron also reads, and a manifest .meta.json. The same "
        "command resumes an interrupted run.",
    )
    data = parser.add_argument_group("input and output")
    data.add_argument("--input", nargs="+", required=True, metavar="PATH", help=INPUT_HELP)
    data.add_argument(
        "--json-keys",
        "--json-key",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of JSON lines, or columns, that hold text; each gives a dataset",
    )
    data.add_argument(
        "--parallel",
        action="store_true",
        help="read one text file for each of --json-keys, such as en and de; line i of each file "
        "is document i",
    )
    data.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="folder and name of the output"
    )
    add_tokenizer_options(parser)
    sentences = parser.add_argument_group("sentences")
    sentences.add_argument(
        "--split-sentences",
        action="store_true",
        help="make each sentence a sequence, for BERT, T5 and ICT; a text that is a list of "
        "strings is taken as split already",
    )
    sentences.add_argument(
        "--sentence-splitter",
        choices=SPLITTERS,
        metavar="NAME",
        help="sentence splitter: punkt has models of 20 languages (the extra sentences); nltk "
        "gives Megatron's sentences with nltk and its data punkt_tab (the extra nltk) [default "
        "punkt]",
    )
    sentences.add_argument(
        "--lang", metavar="LANGUAGE", help="language of the sentences [default english]"
    )
    sentences.add_argument(
        "--keep-newlines",
        action="store_true",
        help="keep the white space after a sentence as its end",
    )
    work = add_work_options(
        parser,
        "a document that cannot be read or tokenized",
        "a longer document (line, text file, texts of a row)",
        "; with 1, the tokenizer uses its own threads",
    )
    work.add_argument(
        "--append-eod",
        action="store_true",
        help="end every document with the end-of-document token",
    )
    work.add_argument(
        "--fast",
        action="store_true",
        help="tokenize with gigatoken (the extra fast) and compare a sample with the tokenizers "
        "library; if they differ, use the tokenizers library for everything",
    )
    parser.set_defaults(run=partial(run, parser))


def run(parser: Parser, arguments: argparse.Namespace) -> int:
    """Preprocesses the input and prints counts and speed of each dataset."""
    from megatron_data.preprocessing.pipeline import preprocess
    from megatron_data.tokenizers.fast import fast_tokenizer

    splitter = _splitter_from(parser, arguments)
    tokenizer = tokenizer_from(parser, arguments)
    finished = preprocess(
        arguments.input,
        arguments.output_prefix,
        fast_tokenizer(tokenizer) if arguments.fast else tokenizer,
        json_keys=arguments.json_keys,
        parallel=arguments.parallel,
        append_eod=arguments.append_eod,
        splitter=splitter,
        workers=arguments.workers,
        on_error=arguments.on_error,
        max_document_bytes=arguments.max_document_bytes,
        progress=True,
        overwrite=arguments.overwrite,
    )
    first = finished[0]
    print_resumed(first)
    for dataset in finished:
        counts, seconds = dataset.counts, max(dataset.seconds, 1e-9)
        empty = f" ({counts.empty_documents:,} empty)" if counts.empty_documents else ""
        print(
            f"{dataset.prefix}: {plural(counts.documents, 'document')}{empty}, "
            f"{plural(counts.tokens, 'token')} "
            f"in {seconds:.1f} s ({dataset.bytes_read / 1e6 / seconds:.2f} MB/s, "
            f"{counts.tokens / seconds:,.0f} tokens/s)"
        )
    print_skipped(first, arguments)
    return 0


def _splitter_from(parser: Parser, arguments: argparse.Namespace) -> "SentenceSplitter | None":
    """Returns the sentence splitter of the options, or None without `--split-sentences`."""
    from megatron_data.preprocessing.nltk_sentences import NLTKSplitter
    from megatron_data.preprocessing.sentences import PunktSplitter

    if arguments.split_sentences:
        kind = NLTKSplitter if arguments.sentence_splitter == "nltk" else PunktSplitter
        return kind(arguments.lang or "english", arguments.keep_newlines)
    for name in ("sentence_splitter", "lang", "keep_newlines"):
        if getattr(arguments, name):
            parser.error(f"--{name.replace('_', '-')} needs --split-sentences")
    return None
