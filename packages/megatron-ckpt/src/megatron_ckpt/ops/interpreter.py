"""Application of the rows of a family to all tensors of a model."""

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
    """Yields ``(name, tensor)`` of ours made from theirs, or of theirs from ours if ``inverse``.

    The source is read one row at a time. If it reads tensors on request, memory holds the largest
    row.

    Args:
        rows: The rows of the family (described by `schema.json`).
        config: The configuration of the model, with fields as attributes or keys.
        source: The tensors by name.
        inverse: Whether to convert from ours to theirs. Defaults to False.
        ignored: Foreign tensors that may exist without a row, with the check of their content.

    Raises:
        CheckpointError: Before anything is yielded: a row is invalid, a tensor is missing or unused
            (the message has the nearest name), or an ignored tensor fails its check. Later: an
            operation does not fit the shape of a tensor.
    """
    expanded = expand(rows, config, len(source))
    check_source(expanded, source, inverse=inverse, ignored=[entry[0] for entry in ignored])
    if not inverse:
        check_ignored(expanded, config, source, ignored)
    for row in expanded:
        if inverse:
            converted = row.inverse([source[name] for name in row.ours])
            yield from zip(row.theirs, converted, strict=True)
        else:
            converted = row.forward([source[name] for name in row.theirs])
            yield from zip(row.ours, converted, strict=True)


def check_source(
    rows: Sequence[Row],
    source: Iterable[str],
    *,
    inverse: bool = False,
    ignored: Sequence[str] = (),
) -> None:
    """Refuses a source without a tensor that a row needs, or with a tensor that no row uses."""
    available = set(source)
    needed = {name: None for row in rows for name in (row.ours if inverse else row.theirs)}
    unused = [
        name
        for name in sorted(available - needed.keys())
        if not any(matches(pattern, name) for pattern in ignored)
    ]
    missing = [name for name in needed if name not in available]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        hint = did_you_mean(missing[0], unused)
        raise CheckpointError(f"the source has no tensor {missing[0]!r}{more}{hint}")
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        ours = adapter_hint(unused[0], needed) if inverse else ""
        hint = ours or did_you_mean(unused[0], needed)
        raise CheckpointError(f"no row uses tensor {unused[0]!r}{more} of the source{hint}")
