"""From finished parts to the files of a dataset."""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson

from ..errors import DataError
from ..files import AtomicFile
from ..indexed.builder import IndexedDatasetBuilder, WrittenDataset
from ..indexed.format import TokenType
from ..sources.protocol import KINDS, Fault
from .manifest import Counts, manifest_path
from .origins import Origins
from .parts import WorkFolder


class Assembled(NamedTuple):
    """One dataset, put together.

    Attributes:
        prefix: path of the pair.
        written: the files.
        counts: what they hold.
        origins: where it came from.
    """

    prefix: str
    written: WrittenDataset
    counts: Counts
    origins: Origins


def quarantine_path(output_prefix: str) -> Path:
    """`PREFIX.quarantine.jsonl`."""
    return Path(f"{output_prefix}.quarantine.jsonl")


def assemble(
    folder: WorkFolder,
    chunks: int,
    prefixes: Sequence[str],
    dtype: TokenType,
    quarantine: Path | None,
    without_text: Sequence[str],
) -> tuple[list[Assembled], Counter[str]]:
    """Copy all parts, in order, into a `.bin/.idx` pair for each key.

    Args:
        folder: of the parts.
        chunks: how many parts there are.
        prefixes: of the pairs.
        dtype: token type.
        quarantine: file that takes the faults, if there are any.
        without_text: what to say of each key if there is no token under it.

    Returns:
        The pairs, and how many faults there were of each kind.

    Raises:
        DataError: a part that was damaged since it was done, or no token at all.
    """
    faults: Counter[str] = Counter()
    with ExitStack() as stack:
        builders = [stack.enter_context(IndexedDatasetBuilder(name, dtype)) for name in prefixes]
        origins = [Origins() for _ in prefixes]
        empty = [0] * len(prefixes)
        refused = stack.enter_context(AtomicFile(quarantine)) if quarantine else None
        for number in range(chunks):
            record, keys = folder.read(number, dtype)
            for key, encoded in enumerate(keys):
                builders[key].add_documents(encoded.tokens, encoded.lengths, encoded.sequences)
                origins[key].add(record, len(encoded.tokens))
                empty[key] += int(np.count_nonzero(encoded.sequences == 0))
            for fault in record.faults:
                faults[fault.kind] += 1
                if refused is not None:
                    refused.write(_line(fault))
        for key, builder in enumerate(builders):
            if not builder.tokens:
                folder.finish()  # nothing in it is worth keeping
                raise DataError(without_text[key])
        finished = []
        for builder, origin, without_token in zip(builders, origins, empty, strict=True):
            manifest_path(builder.prefix).unlink(missing_ok=True)  # it describes the older files
            written = builder.finalize()
            counts = Counts(written.documents, without_token, written.sequences, written.tokens)
            finished.append(Assembled(builder.prefix, written, counts, origin))
        if refused is not None and not faults:
            refused.discard()
            refused.path.unlink(missing_ok=True)  # of an older run
    return finished, faults


def _line(fault: Fault) -> bytes:
    content = {
        "path": fault.path,
        "number": fault.number,
        "offset": fault.offset,
        "bytes": fault.size,
        "kind": fault.kind,
        "what": KINDS[fault.kind],
        "reason": fault.reason,
    }
    return orjson.dumps(content, option=orjson.OPT_APPEND_NEWLINE)
