"""Preprocesses text: `preprocess` converts a corpus to `.bin`, `.idx` and a manifest."""

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
    sentences, for datasets of BERT, T5 and the inverse cloze task.

    Documents keep the order of the input, and the files are byte-identical for any number of
    workers. No file appears under its name before it is complete; existing datasets are replaced.
    As in Megatron, a text without tokens is a document without sequences.

    Finished chunks are stored in a hidden folder beside the output, `.NAME.parts`, until the last
    one is finished. If a run ends early for any reason, a run with the same tokenizer and options
    resumes it: chunks with the same content are not encoded again.

    Args:
        inputs: JSON lines, one object per line; `.txt` files, each one document; `.parquet` files,
            one document per row; `.gz`, `.bz2` and `.zst` files of the first two; folders, read
            recursively: first their `.txt` files, sorted, then their `.jsonl` and `.parquet` files;
            glob patterns; URLs that fsspec opens.
        output_prefix: Folder and name, to which `_{key}_document` is appended.
        tokenizer: The tokenizer; see `load_tokenizer`. A sample of the tokens of a `FastTokenizer`
            is checked; if a text has different tokens, the run starts again with its reference and
            logs a warning.
        json_keys: Keys of texts; each gives a dataset. The text of a `.txt` file is used for any
            key, but only for one.
        parallel: Whether the inputs are a parallel corpus: one text file per key, in which line i
            of each file is document i. Every line is a text, for any file name, even if it is
            empty.
        append_eod: Whether to end every document with the end-of-document token.
        splitter: Splits texts into sentences, such as a `PunktSplitter`. A text that is a list of
            several strings is taken as split already. Sentences without tokens are dropped.
        workers: Worker processes. With 1, the tokenizer runs in this process with its own threads;
            with more, each process uses one thread.
        on_error: What to do with a document that cannot be read or tokenized: "fail" ends the run
            with its location and the reason, "skip" counts it, "quarantine" also writes its
            location and the reason to `{output_prefix}.quarantine.jsonl`. With several keys the
            document is dropped from every dataset.
        max_document_bytes: Largest size of a document in its source in bytes (the line, the text
            file, or the texts of the row). A larger document is treated as `on_error` says and is
            not held in memory. None for no limit.
        chunk_bytes: Bytes of a source chunk. Defaults to 1 to 16 MiB by the size of the input.
        progress: Whether to show a progress bar on stderr with MB/s, tokens/s and time left.
        overwrite: Whether to replace existing datasets. If False, they are an error unless they
            belong to an interrupted run that is resumed.

    Returns:
        One `PreprocessedDataset` per key.

    Raises:
        DataError: An input is missing or empty, a line or text cannot be read and is not skipped
            (the error names file and location), parallel files have different numbers of lines, the
            output is a URL or a folder, or another process writes the same output.
    """
    started = perf_counter()
    prefix = local_prefix(output_prefix)
    if len(set(json_keys)) < len(json_keys):
        raise DataError(f"--json-keys {' '.join(json_keys)}: give each key once")
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
        _log.warning("%s; the run starts again without gigatoken", error)
        made = run(tokenizer.reference)
    seconds = perf_counter() - started
    return [replace(dataset, seconds=seconds) for dataset in made]
