"""Preprocessing of text: a corpus in, `.bin/.idx` and a manifest out."""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

from megatron_data.errors import DataError
from megatron_data.files import local_prefix
from megatron_data.preprocessing.encoding import TextEncoder
from megatron_data.preprocessing.engine import OnError, PreprocessedDataset, WorkOptions, run_job
from megatron_data.preprocessing.sentences import SentenceSplitter
from megatron_data.sources.opening import open_parallel, open_sources
from megatron_data.sources.protocol import MAX_DOCUMENT_BYTES
from megatron_data.tokenizers.fast import FastTokenizer, MismatchError
from megatron_data.tokenizers.protocol import Tokenizer

_log = logging.getLogger("megatron_data")


def preprocess(
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    json_keys: Sequence[str] = ("text",),
    parallel: bool = False,
    append_eod: bool = False,
    splitter: SentenceSplitter | None = None,
    workers: int = 1,
    on_error: OnError = "fail",
    max_document_bytes: int | None = MAX_DOCUMENT_BYTES,
    chunk_bytes: int | None = None,
    progress: bool = False,
    overwrite: bool = True,
) -> list[PreprocessedDataset]:
    """Tokenizes text into `{output_prefix}_{key}_document.bin`, `.idx` and `.meta.json`.

    With a `splitter` the names end in `_sentence`, and the sequences of a document are its
    sentences, as datasets of BERT, T5 and the inverse cloze task want them.

    Documents keep the order of the input, and the files are the same byte for byte whatever the
    number of workers. Nothing takes its name before it is whole; an older dataset of the same
    name is replaced. A text that gives no token is kept as a document without sequences, as
    Megatron does.

    The work is done in chunks, which are kept in a hidden folder beside the output,
    `.NAME.parts`, until the last is done. A run that was ended, however that was, is continued by
    one with the same tokenizer and options: chunks whose content is the same are not done again.

    Args:
        inputs: files of JSON lines, one object a line; files whose name ends in `.txt`, each one
            document; `.parquet` files, a document in each row; `.gz`, `.bz2` and `.zst` of the
            first two; folders, which stand for the `.txt` files in them and below, sorted, and
            after them for their `.jsonl` and `.parquet` files; patterns; URLs that fsspec opens.
        output_prefix: path and name to which `_{key}_document` is appended.
        tokenizer: see `load_tokenizer`; a `FastTokenizer` is checked as it goes, and all is done
            anew with its reference, which a warning says, at the first text whose tokens differ.
        json_keys: keys whose text is tokenized, each into a dataset of its own. The text of a
            `.txt` file stands for any key, but for one only.
        parallel: the inputs are text files, one for each key, of which line i of each is document
            i: a corpus of translations. Whatever the names, a line is a text, an empty one, too.
        append_eod: end every document with the tokenizer's end-of-document token.
        splitter: what cuts texts into sentences, such as a `PunktSplitter`; texts that are lists of
            several strings are cut already. Sentences without a token are left out.
        workers: processes. With 1 no process is started and the tokenizer runs here, in its own
            threads; with more, each process uses one thread.
        on_error: what to do with a document that cannot be read or tokenized: "fail" ends the
            run with its place and the reason, "skip" counts it, "quarantine" also writes its
            place and the reason to `{output_prefix}.quarantine.jsonl`. With several keys it is
            left out of every dataset.
        max_document_bytes: a document of more bytes in its source (the line, the text file, the
            texts of the row) is such a document, and is not kept in memory; None for no limit.
        chunk_bytes: bytes of text in a chunk; None for 1 to 16 MiB, by the size of the input.
        progress: show a bar on stderr with MB/s, tokens/s and the time left.
        overwrite: replace older datasets of these names; otherwise they are refused, unless a run
            of the same work that was ended is continued.

    Returns:
        One `PreprocessedDataset` per key.

    Raises:
        DataError: missing or empty input; a line or text that cannot be read (file and place),
            unless it is to be skipped; parallel files of unequal numbers of lines; an output that
            is a URL or a folder; another process writes the same output.
    """
    started = perf_counter()
    prefix = local_prefix(output_prefix)
    if len(set(json_keys)) < len(json_keys):
        raise DataError(f"--json-keys {' '.join(json_keys)}: name every key once")
    work = WorkOptions(workers, on_error, chunk_bytes, progress, overwrite)

    def run(chosen: Tokenizer) -> list[PreprocessedDataset]:
        encoder = TextEncoder(chosen, tuple(json_keys), append_eod, max_document_bytes, splitter)
        keys = encoder.keys
        sources = [open_parallel(inputs, keys)] if parallel else open_sources(inputs, keys)
        return run_job(sources, prefix, encoder, work, "preprocess").datasets

    try:
        made = run(tokenizer)
    except MismatchError as error:
        if not isinstance(tokenizer, FastTokenizer):
            raise
        _log.warning("%s; all is done anew without gigatoken", error)
        made = run(tokenizer.reference)
    seconds = perf_counter() - started
    return [replace(dataset, seconds=seconds) for dataset in made]
