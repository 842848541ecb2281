"""Texts and their images to a multimodal dataset."""

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
    """What became of texts and images.

    Attributes:
        prefix: path of the pair without `.bin` or `.idx`.
        pairs: written, each a document.
        tokens: of the texts, those that fill them up included.
        image_bytes: of the images, as their files lie.
        truncated: texts that lost their end to `pad_length`.
        dataset: the dataset, and what was skipped.
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
    """Writes `{output_prefix}_image_text`, a multimodal dataset of texts beside their images.

    Every line, row or text file is a document of two sequences: the tokens of the text (mode 0),
    and the image file, byte for byte (mode 1, see `unpack_image`). The layout is that of Megatron's
    `preprocess_mmdata.py`, int32 whatever the vocabulary. A line or row names its image; the image
    of a text file is that of the same name, but for the suffix, in `image_folder`.

    The work is done as in `preprocess`: in the order of the input, with the same bytes whatever the
    number of workers; a run that was ended goes on. What it has done is done anew where an image
    has another size or time (of a URL: tag) than before. Until the end it takes the room on the
    disk twice.

    Args:
        inputs: JSON lines or Parquet files, packed ones, folders, patterns and URLs; or text files
            and folders of them.
        output_prefix: path and name.
        tokenizer: of the texts.
        json_keys: key or column of the text, and that of the path of its image.
        image_folder: folder or URL below which the paths are; None for that of each input. With
            text files, what holds their images.
        append_eod: end every text with the end-of-document token.
        pad_length: tokens that every text has: longer ones are cut, and those that are shorter are
            filled up with end-of-document tokens. Needs `append_eod`. None leaves them as they are.
        workers: processes, which read the images and tokenize.
        on_error: what a line, a text or an image does that cannot be read: "fail" ends the run,
            "skip" counts it, "quarantine" also writes its place and the reason to
            `{output_prefix}.quarantine.jsonl`.
        max_document_bytes: a line, row or text file of more bytes is such a line; None for no
            limit.
        max_image_bytes: the same of an image.
        allow_http: let lines name images on web servers, to which this machine then connects.
            Local files and object storage they may name in any case.
        chunk_bytes: bytes of the input in a chunk, whose images are in memory together; None for
            32 KiB.
        progress: show a bar on stderr.
        overwrite: replace older datasets of these names; otherwise they are refused, unless a run
            of the same work that was ended is continued.

    Raises:
        DataError: a line that cannot be read, an image that is missing, or a file that is none
            (the line, the path and the reason); no pair at all; text files and images that do not
            belong together; `append_eod` with a tokenizer without that token, `pad_length` without
            `append_eod`; an output that is a URL or a folder.
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
            f"{texts[0].path} holds texts and other inputs hold lines or rows; give one kind at a "
            "time, and merge the datasets"
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
    """Returns the image of every text file.

    Raises:
        DataError: a text without an image, an image without a text, or two of one name.
    """
    if folder is not None and not is_folder(folder):
        raise DataError(f"--input-image {folder} is no folder; give the one that holds the images")
    if folder is None:
        raise DataError(
            f"{texts[0].path}: text files name no images; give --input-image FOLDER with an image "
            "of the name of each"
        )
    images = _by_name((_stem(path, folder), path) for path in list_files(folder))
    named = _by_name((_stem(path, text.path), path) for text in texts for path in text.files)
    unmatched_texts = [path for name, path in named.items() if name not in images]
    unmatched_images = [path for name, path in images.items() if name not in named]
    if unmatched_texts or unmatched_images:
        told = [
            f"{plural(len(paths), what)} without {its} ({', '.join(paths[:3])}"
            f"{', …' if len(paths) > 3 else ''})"
            for what, its, paths in (
                ("text", f"an image of the same name in {folder}", unmatched_texts),
                ("image", "a text", unmatched_images),
            )
            if paths
        ]
        raise DataError(f"{' and '.join(told)}; a text and its image have one name")
    return {path: images[name] for name, path in named.items()}


def _by_name(files: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Files by what they are called without their suffix."""
    found: dict[str, str] = {}
    for name, path in files:
        if found.setdefault(name, path) != path:
            raise DataError(f"{found[name]} and {path} have one name; they cannot be told apart")
    return found


def _stem(path: str, folder: str) -> str:
    """The name of a file below a folder without its suffix, or of a file that was given itself."""
    name = Path(path).name if path == folder else relative_path(path, folder)
    kind, packed = split_suffix(name)
    return name[: len(name) - len(kind) - len(packed)]
