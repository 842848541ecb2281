"""Foreign tensors that no row uses: each is checked to be redundant before it is ignored.

A family lists them as ``(pattern, check, arguments)``, plain data like the operations of a row.
``"$field"`` stands for a field of the model configuration.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from megatron_ckpt.errors import CheckpointError, did_you_mean
from megatron_ckpt.ops.layers import LAYER, resolve_field
from megatron_ckpt.ops.rows import Row

if TYPE_CHECKING:
    from torch import Tensor

Ignored = tuple[str, str, Mapping[str, Any]]
"""The pattern of names, the name of the check, and the arguments of the check."""


class _Tensors(Protocol):
    def __getitem__(self, name: str) -> "Tensor": ...

    def __iter__(self) -> Iterator[str]: ...


_ROWS = 4096  # rows of two matrices that are compared at once


def check_ignored(
    rows: Iterable[Row], config: object, source: _Tensors, ignored: Sequence[Ignored]
) -> None:
    """Checks every tensor that no row uses and that matches a pattern in ``ignored``.

    Memory holds one tensor at a time, and for `same_as` the tensor that it is compared with.

    Raises:
        CheckpointError: A tensor differs from what a model of this configuration computes by
            itself.
    """
    used = {name for row in rows for name in row.theirs}
    for name in sorted(set(source) - used):
        for pattern, kind, arguments in ignored:
            if matches(pattern, name):
                if kind not in CHECKS:
                    raise CheckpointError(
                        f"ignored {pattern!r}: unknown check {kind!r}{did_you_mean(kind, CHECKS)}"
                    )
                filled = {
                    key: resolve_field(value, config, pattern) if _is_field(value) else value
                    for key, value in arguments.items()
                }
                CHECKS[kind](name, source, **filled)
                break


def matches(pattern: str, name: str) -> bool:
    """Returns whether a name matches a pattern, in which ``{i}`` stands for a layer number."""
    return re.fullmatch(re.escape(pattern).replace(re.escape(LAYER), r"\d+"), name) is not None


def _is_field(value: object) -> bool:
    return isinstance(value, str) and value.startswith("$")


def _same_as(name: str, source: _Tensors, *, other: str, rows: int) -> None:
    """Checks that the first ``rows`` rows of both tensors are equal, as for a tied weight."""
    import torch

    ours, theirs = source[name], source[other]
    equal = ours.shape[1:] == theirs.shape[1:] and min(len(ours), len(theirs)) >= rows
    for start in range(0, rows if equal else 0, _ROWS):
        stop = min(start + _ROWS, rows)
        equal = equal and torch.equal(ours[start:stop].double(), theirs[start:stop].double())
    if not equal:
        raise CheckpointError(
            f"tensor {name!r} differs from {other!r}, but the configuration ties them; "
            'if the model has both, set "tie_word_embeddings": false in its config.json'
        )


def _causal_mask(name: str, source: _Tensors) -> None:
    """Checks that a buffer ``[..., s, s]`` has ones up to the diagonal and zeros after it."""
    import torch

    mask = source[name]
    square = mask.ndim >= 2 and mask.numel() == mask.shape[-1] ** 2 and mask.shape[-1] > 0
    if square:
        mask = mask.reshape(mask.shape[-1], -1)
        square = torch.equal(mask, torch.ones_like(mask).tril())
    if not square:
        raise CheckpointError(
            f"tensor {name!r} is not a causal mask; the attention of this model is not supported"
        )


def _at_most(name: str, source: _Tensors, *, value: float) -> None:
    """Checks that a tensor is one number of at most ``value``, as used for masked scores."""
    tensor = source[name]
    if tensor.numel() != 1 or not float(tensor.reshape(())) <= value:
        raise CheckpointError(
            f"tensor {name!r} must be one number of at most {value:g}, the value of masked scores"
        )


def _count_up(name: str, source: _Tensors) -> None:
    """Checks that a tensor counts up from 0, as the position ids of a model do."""
    import torch

    found = source[name].reshape(-1)
    if not torch.equal(found.long(), torch.arange(len(found))):
        raise CheckpointError(f"tensor {name!r} does not count up from 0")


def _not_read(name: str, source: _Tensors) -> None:
    """Accepts a tensor that the class in ``architectures`` does not read, such as another head."""
    del name, source


def _rotary_frequencies(name: str, source: _Tensors, *, base: float, dim: int) -> None:
    """Checks for unscaled frequencies, to the precision of the dtype.

    The frequency of pair ``j`` is ``base ** (-2 j / dim)``.
    """
    import torch

    found = source[name]
    equal = found.is_floating_point() and found.ndim == 1 and 2 * len(found) == dim
    if equal:
        wanted = base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        precision = torch.finfo(found.dtype)
        tolerance = max(2 * precision.eps, 1e-5)
        # The step between subnormal numbers; low frequencies are subnormal in float16.
        step = precision.smallest_normal * precision.eps
        equal = torch.allclose(found.double(), wanted, rtol=tolerance, atol=step)
    if not equal:
        raise CheckpointError(
            f"tensor {name!r} differs from the rotary frequencies of the configuration "
            f"(base {base:g}, {dim} channels); its rotary settings are not supported"
        )


CHECKS: Mapping[str, Callable[..., None]] = MappingProxyType(
    {
        "same_as": _same_as,
        "causal_mask": _causal_mask,
        "at_most": _at_most,
        "count_up": _count_up,
        "not_read": _not_read,
        "rotary_frequencies": _rotary_frequencies,
    }
)
