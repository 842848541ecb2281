"""From finished parts to the files of a dataset."""

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


@dataclass
class Assembly:
    """All datasets, and what was counted on the way.

    Attributes:
        datasets: in the order of the outputs.
        faults: how many there were of each kind.
        first_fault: the first of them; None if there is none.
        tallies: what the encoder counted.
    """

    datasets: list[AssembledDataset] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    first_fault: Fault | None = None
    tallies: Counter[str] = field(default_factory=Counter)

    def add_record(self, record: PartRecord) -> None:
        """Counts what a part says of itself."""
        self.tallies.update(record.tallies)
        for fault in record.faults:
            self.faults[fault.kind] += 1
            self.first_fault = self.first_fault or fault

    def explain_empty(self, output: Output) -> str:
        """Returns why an output may have nothing, in brackets; empty where nothing was left out."""
        why = [
            f"{self.tallies[name]:,} {words}"
            for name, words in output.skip_reasons
            if self.tallies[name]
        ]
        if self.first_fault:
            why.append(f"the first that was left out: {self.first_fault}")
        return f" ({'; '.join(why)})" if why else ""


def quarantine_path(output_prefix: str) -> Path:
    """`PREFIX.quarantine.jsonl`."""
    return Path(f"{output_prefix}.quarantine.jsonl")


def assemble(
    folder: WorkFolder,
    chunks: int,
    prefix: str,
    outputs: Sequence[Output],
    quarantined: bool,
    sources: str,
) -> Assembly:
    """Copies all parts, in order, into a `.bin/.idx` pair for each output.

    Args:
        folder: of the parts.
        chunks: how many parts there are.
        prefix: what the names of all pairs begin with.
        outputs: the datasets.
        quarantined: whether the faults are written to the file of `quarantine_path`, if there are
            any. An older file of that name goes with the older datasets.
        sources: what the inputs are called.

    Raises:
        DataError: a part that was damaged since it was done, or an output without a token.
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
            for place, part in enumerate(parts):
                builders[place].add_documents(*part)
                origins[place].add(record, len(part.tokens))
                empty[place] += int(np.count_nonzero(part.sequences == 0))
            made.add_record(record)
            if refused is not None:
                for fault in record.faults:
                    refused.write(_line(fault))
        for output, builder in zip(outputs, builders, strict=True):
            if not builder.tokens:
                folder.mark_finished()  # nothing in it is worth keeping
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
    """Takes the indices of older datasets away, and the manifests that describe them.

    All of them, before the first new one takes its name: an older mask must never be seen beside
    new tokens, nor a language of another corpus beside a new one.
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
