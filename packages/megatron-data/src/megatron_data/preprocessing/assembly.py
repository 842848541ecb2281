"""Assembles the files of datasets from finished parts."""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson

from megatron_data.errors import DataError
from megatron_data.files import AtomicFile
from megatron_data.indexed.builder import IndexedDatasetBuilder, WrittenDataset
from megatron_data.indexed.format import idx_path
from megatron_data.preprocessing.manifest import Counts, manifest_path
from megatron_data.preprocessing.origins import Origins
from megatron_data.preprocessing.parts import PartRecord, WorkFolder
from megatron_data.preprocessing.protocol import Output
from megatron_data.sources.protocol import KINDS, Fault


class AssembledDataset(NamedTuple):
    """One assembled dataset.

    Attributes:
        prefix: Path of the files without suffix.
        written: The files.
        counts: Their counts.
        origins: The map from its documents to the sources.
    """

    prefix: str
    written: WrittenDataset
    counts: Counts
    origins: Origins


@dataclass
class Assembly:
    """All assembled datasets with counters.

    Attributes:
        datasets: The datasets in the order of the outputs.
        faults: Number of faults of each kind.
        first_fault: The first fault, or None.
        tallies: Counters of the encoder.
    """

    datasets: list[AssembledDataset] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    first_fault: Fault | None = None
    tallies: Counter[str] = field(default_factory=Counter)

    def add_record(self, record: PartRecord) -> None:
        """Adds the counters and faults of a part."""
        self.tallies.update(record.tallies)
        for fault in record.faults:
            self.faults[fault.kind] += 1
            self.first_fault = self.first_fault or fault

    def explain_empty(self, output: Output) -> str:
        """Returns in brackets why an output has no documents; empty if nothing was skipped."""
        why = [
            f"{self.tallies[name]:,} {words}"
            for name, words in output.skip_reasons
            if self.tallies[name]
        ]
        if self.first_fault:
            why.append(f"the first skipped document: {self.first_fault}")
        return f" ({'; '.join(why)})" if why else ""


def quarantine_path(output_prefix: str) -> Path:
    """Returns the path `PREFIX.quarantine.jsonl`."""
    return Path(f"{output_prefix}.quarantine.jsonl")


def assemble(
    folder: WorkFolder,
    chunks: int,
    prefix: str,
    outputs: Sequence[Output],
    quarantined: bool,
    sources: str,
) -> Assembly:
    """Copies all parts in order into `.bin` and `.idx` files of each output.

    Args:
        folder: The folder of the parts.
        chunks: Number of parts.
        prefix: Common prefix of all datasets.
        outputs: The datasets to write.
        quarantined: Whether to write the faults, if any, to the file of `quarantine_path`. An
            existing file of that name is removed with the existing datasets.
        sources: Names of the inputs, for an error.

    Raises:
        DataError: A part was damaged since it was written, or an output has no tokens.
    """
    made = Assembly()
    with ExitStack() as stack:
        builders = [
            stack.enter_context(
                IndexedDatasetBuilder(prefix + output.suffix, output.dtype, output.multimodal)
            )
            for output in outputs
        ]
        origins = [Origins() for _ in outputs]
        empty = [0] * len(outputs)
        quarantine = quarantine_path(prefix)
        refused = stack.enter_context(AtomicFile(quarantine)) if quarantined else None
        for number in range(chunks):
            record, parts = folder.read(number, outputs)
            for index, part in enumerate(parts):
                builders[index].add_documents(*part)
                origins[index].add(record, len(part.tokens))
                empty[index] += int(np.count_nonzero(part.sequences == 0))
            made.add_record(record)
            if refused is not None:
                for fault in record.faults:
                    refused.write(_line(fault))
        for output, builder in zip(outputs, builders, strict=True):
            if not builder.tokens:
                folder.mark_finished()  # so that the folder is removed
                why = made.explain_empty(output)
                raise DataError(f"no document with {output.required_content} in {sources}{why}")
        _remove_older([builder.prefix for builder in builders])
        quarantine.unlink(missing_ok=True)
        for builder, origin, without_token in zip(builders, origins, empty, strict=True):
            written = builder.finalize()
            counts = Counts(
                written.documents,
                without_token,
                written.sequences,
                written.tokens,
                written.images,
                written.image_bytes,
            )
            made.datasets.append(AssembledDataset(builder.prefix, written, counts, origin))
        if refused is not None and not made.faults:
            refused.discard()
    return made


def _remove_older(prefixes: Sequence[str]) -> None:
    """Removes the indices and manifests of existing datasets.

    All of them are removed before the first new dataset appears, so that an old mask never lies
    beside new tokens, nor an old dataset of one language beside a new one of another language.
    """
    for prefix in reversed(prefixes):
        manifest_path(prefix).unlink(missing_ok=True)
        idx_path(prefix).unlink(missing_ok=True)


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
