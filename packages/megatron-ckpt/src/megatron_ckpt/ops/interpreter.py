"""Running the rows of a family over all tensors of a model, one of ours at a time."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_ckpt.errors import CheckpointError, adapter_hint, did_you_mean
from megatron_ckpt.ops.ignored import Ignored, check_ignored, matches
from megatron_ckpt.ops.rows import Row, RowData, expand

if TYPE_CHECKING:
    from torch import Tensor


def apply_rows(
    rows: Sequence[RowData],
    config: object,
    source: Mapping[str, "Tensor"],
    *,
    inverse: bool = False,
    ignored: Sequence[Ignored] = (),
) -> Iterator[tuple[str, "Tensor"]]:
    """Yields ``(name, tensor)`` of ours made from theirs, or with ``inverse`` of theirs from ours.

    The source is asked for the tensors of one row at a time, so memory holds the largest row if the
    mapping reads when asked.

    Args:
        rows: of the family (`schema.json` describes them).
        config: the model's configuration, fields as attributes or keys.
        source: tensors by name.
        inverse: from ours to theirs.
        ignored: foreign tensors that may be there without a row, with what they must hold.

    Raises:
        CheckpointError: before anything is yielded for bad rows, for missing or unused tensors,
            with the nearest name, and for ignored ones that hold something; later for a tensor of a
            shape an operation cannot take.
    """
    expanded = expand(rows, config, len(source))
    check_source(expanded, source, inverse=inverse, ignored=[entry[0] for entry in ignored])
    if not inverse:
        check_ignored(expanded, config, source, ignored)
    for row in expanded:
        if inverse:
            made = row.inverse([source[name] for name in row.ours])
            yield from zip(row.theirs, made, strict=True)
        else:
            made = row.forward([source[name] for name in row.theirs])
            yield from zip(row.ours, made, strict=True)


def check_source(
    rows: Sequence[Row],
    source: Iterable[str],
    *,
    inverse: bool = False,
    ignored: Sequence[str] = (),
) -> None:
    """Refuses a source that lacks a tensor of a row or has one that no row uses."""
    there = set(source)
    needed = {name: None for row in rows for name in (row.ours if inverse else row.theirs)}
    unused = [
        name
        for name in sorted(there - needed.keys())
        if not any(matches(pattern, name) for pattern in ignored)
    ]
    missing = [name for name in needed if name not in there]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        hint = did_you_mean(missing[0], unused)
        raise CheckpointError(f"the source has no tensor {missing[0]!r}{more}{hint}")
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        ours = adapter_hint(unused[0], needed) if inverse else ""
        hint = ours or did_you_mean(unused[0], needed)
        raise CheckpointError(f"no row uses tensor {unused[0]!r}{more} of the source{hint}")
