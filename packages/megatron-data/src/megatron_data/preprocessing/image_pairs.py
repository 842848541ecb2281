"""Preprocesses texts with their images: `tokenize_image_pairs`."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_data.errors import DataError
from megatron_data.files import local_prefix
from megatron_data.plural import plural
from megatron_data.preprocessing.engine import OnError, PreprocessedDataset, WorkOptions, run_job
from megatron_data.preprocessing.image_encoding import ImageLocator, ImagePairEncoder, TextEnding
from megatron_data.sources.opening import find_sources
from megatron_data.sources.protocol import MAX_DOCUMENT_BYTES
from megatron_data.sources.storage import is_folder, list_files, relative_path
from megatron_data.sources.streams import split_suffix
from megatron_data.sources.text_files import TextFiles
from megatron_data.tokenizers.protocol import Tokenizer


@dataclass(frozen=True)
class ImagePairsReport:
    """Counts of `tokenize_image_pairs`.

    Attributes:
        prefix: Path of the dataset without `.bin` or `.idx`.
        pairs: Pairs written; each is a document.
        tokens: Tokens of the texts, including padding.
        image_bytes: Bytes of the image files.
        truncated: Texts truncated to `pad_length`.
        dataset: The dataset with what was skipped.
    """

    prefix: str
    pairs: int
    tokens: int
    image_bytes: int
    truncated: int
    dataset: PreprocessedDataset


def tokenize_image_pairs(
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    json_keys: tuple[str, str] = ("text", "image"),
    image_folder: str | os.PathLike[str] | None = None,
    append_eod: bool = False,
    pad_length: int | None = None,
    workers: int = 1,
    on_error: OnError = "fail",
    max_document_bytes: int | None = MAX_DOCUMENT_BYTES,
    max_image_bytes: int | None = MAX_DOCUMENT_BYTES,
    allow_http: bool = False,
    chunk_bytes: int | None = None,
    progress: bool = False,
    overwrite: bool = True,
) -> ImagePairsReport:
    """Writes `{output_prefix}_image_text`, a multimodal dataset of texts with their images.

    Every line, row or text file is a document of two sequences: the tokens of the text (mode 0)
    and the bytes of the image file (mode 1, see `unpack_image`). The layout is that of Megatron's
    `preprocess_mmdata.py`, with int32 for every vocabulary. A line or row names its image. The
    image of a text file has the same name with another suffix, in `image_folder`.

    As in `preprocess`, documents keep the order of the input, the files do not depend on the number
    of workers, and an interrupted run is resumed. A finished chunk is encoded again if one of its
    images has changed in size or time (for a URL: tag). During the run, the data take twice their
    size on the disk.

    Args:
        inputs: JSON lines, compressed JSON lines, Parquet files, folders, glob patterns and URLs;
            or text files and folders of them.
        output_prefix: Folder and name of the output.
        tokenizer: The tokenizer.
        json_keys: Keys or columns of the text and of the path of its image.
        image_folder: Folder or URL that paths of images are relative to. Defaults to the folder of
            each input. With text files, the folder of their images.
        append_eod: Whether to end every text with the end-of-document token.
        pad_length: Number of tokens to which texts are truncated or padded with end-of-document
            tokens. Needs `append_eod`. None keeps the lengths.
        workers: Worker processes, which read the images and tokenize.
        on_error: What to do with a line, text or image that cannot be read: "fail" ends the run,
            "skip" counts it, "quarantine" also writes its location and the reason to
            `{output_prefix}.quarantine.jsonl`.
        max_document_bytes: Largest size of a line, row or text file in bytes; a larger one is
            treated as `on_error` says. None for no limit.
        max_image_bytes: Largest size of an image in bytes, likewise.
        allow_http: Whether lines may name images on web servers, to which this machine then
            connects. Local files and object storage are always allowed.
        chunk_bytes: Bytes of a source chunk, whose images are in memory together. Defaults to
            32 KiB.
        progress: Whether to show a progress bar on stderr.
        overwrite: Whether to replace an existing dataset. If False, it is an error unless it
            belongs to an interrupted run that is resumed.

    Raises:
        DataError: A line cannot be read, an image is missing or is not an image (the error names
            line, path and reason), there is no pair, text files and images do not match, the
            tokenizer has no token for `append_eod`, `pad_length` is given without `append_eod`, or
            the output is a URL or a folder.
    """
    if max_image_bytes is not None and max_image_bytes < 1:
        raise DataError(f"--max-image-bytes {max_image_bytes}; give at least 1")
    work = WorkOptions(workers, on_error, chunk_bytes, progress, overwrite)
    ends = TextEnding.from_options(tokenizer, append_eod, pad_length)
    prefix = local_prefix(output_prefix)
    folder = None if image_folder is None else os.fspath(image_folder)
    keys: tuple[str, ...] = json_keys
    sources = find_sources(inputs, keys)
    texts = [source for source in sources if isinstance(source, TextFiles)]
    images = ImageLocator(folder, allow_http=allow_http, max_bytes=max_image_bytes)
    if texts and len(texts) < len(sources):
        raise DataError(
            f"{texts[0].path} is a text file or a folder of them, and other inputs hold lines or "
            "rows; preprocess each kind separately and merge the datasets"
        )
    if texts:
        images, keys = images._replace(by_text_file=_images_of(texts, folder)), keys[:1]
    encoder = ImagePairEncoder(tokenizer, ends, images, keys, max_document_bytes)
    (made,), tallies = run_job(sources, prefix, encoder, work, "tokenize-images")
    return ImagePairsReport(
        made.prefix,
        made.counts.documents,
        tallies["text_tokens"],
        tallies["image_bytes"],
        tallies["truncated"],
        made,
    )


def _images_of(texts: Sequence[TextFiles], folder: str | None) -> dict[str, str]:
    """Returns the path of the image of each text file.

    Raises:
        DataError: A text has no image, an image has no text, or two files have the same name.
    """
    if folder is not None and not is_folder(folder):
        raise DataError(
            f"--input-image {folder} is not a folder; give the folder that holds the images"
        )
    if folder is None:
        raise DataError(
            f"{texts[0].path}: text files do not name images; give --input-image FOLDER with an "
            "image of the same name for each text"
        )
    images = _by_name((_stem(path, folder), path) for path in list_files(folder))
    named = _by_name((_stem(path, text.path), path) for text in texts for path in text.files)
    unmatched_texts = [path for name, path in named.items() if name not in images]
    unmatched_images = [path for name, path in images.items() if name not in named]
    if unmatched_texts or unmatched_images:
        unmatched = [
            f"{plural(len(paths), what)} without {its} ({', '.join(paths[:3])}"
            f"{', …' if len(paths) > 3 else ''})"
            for what, its, paths in (
                ("text", f"an image of the same name in {folder}", unmatched_texts),
                ("image", "a text", unmatched_images),
            )
            if paths
        ]
        raise DataError(f"{' and '.join(unmatched)}; a text and its image need the same name")
    return {path: images[name] for name, path in named.items()}


def _by_name(files: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Returns files by their names without suffix."""
    found: dict[str, str] = {}
    for name, path in files:
        if found.setdefault(name, path) != path:
            raise DataError(f"{found[name]} and {path} have the same name; rename one of them")
    return found


def _stem(path: str, folder: str) -> str:
    """Returns the name of a file without its suffix, relative to a folder or of the file alone."""
    name = Path(path).name if path == folder else relative_path(path, folder)
    kind, compression = split_suffix(name)
    return name[: len(name) - len(kind) - len(compression)]
