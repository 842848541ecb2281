"""Dropout with masks that are the same for every layout.

Whether an element is dropped is a hash of (seed, iteration, global sample, layer, site, position,
channel). Each rank computes the same hash for an element, so tensor-parallel ranks (which cut
channels), sequence-parallel ranks (positions) and data-parallel ranks (samples) drop the same
elements as a single rank. Recomputation drops the same elements as the forward pass, and a resumed
run continues as if it had not stopped. There is no generator and no state to save.

    key = DropoutKey.for_batch(seed=1234, iteration=7, samples=numbers, positions=4096)   # [s, b]
    x = keyed_dropout(x, 0.1, key, layer=3, site=1)                             # [s, b, h]
    y = keyed_dropout(y, 0.1, key, layer=3, site=2, channels=tp.index * width)  # [s, b, f/tp]
    z = keyed_dropout(z, 0.1, key.shard(tp), layer=3, site=3)                   # [s/tp, b, h]

The key of a (sample, position) is a hash chained over seed, iteration, sample and position; layer
and site enter as two constants. The hash is part of the format: changing it changes every training
curve.

Only the key, two 32-bit words for each (sample, position), is saved for the backward pass, which
computes the mask again. In compiled code, hash and product are one loop over the elements. On a GPU
`keyed_dropout` compiles itself, if torch can; `dropout_fusion` returns whether and why not.
"""

from dataclasses import dataclass
from functools import cache
from math import prod
from types import FunctionType
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Int32, Int64
from torch import Tensor
from torch.autograd import Function

from megatron_parallel import _compat
from megatron_parallel.dropout.hash import WORD, bits, folded, low, mixed, signed
from megatron_parallel.dropout.key import DropoutKey, DropoutSite
from megatron_parallel.errors import LayoutError

_SLICE: Final = 2**18  # elements


def keyed_dropout(
    x: Float[Tensor, "s b *channels"],
    p: float,
    key: DropoutKey,
    *,
    layer: int | Int64[Tensor, ""],
    site: int,
    channels: int | Int[Tensor, "..."] = 0,
) -> Float[Tensor, "s b *channels"]:
    """Zeros elements with probability `p` and multiplies the others by `1 / (1 - p)`.

    Returns `x` itself if `p` is 0. Can be differentiated once.

    Args:
        x: `[s, b, ...]`. All dims after `[s, b]` are channels, indexed in row-major order.
            Attention probabilities `[b, n, s, t]` are passed as a permuted view.
        p: Probability of dropping an element, `0 <= p < 1`.
        key: Key of the same `[s, b]`.
        layer: Global index of the layer; a tensor to compile the same code for all layers.
        site: Index of the call of `keyed_dropout` in the layer.
        channels: Global index of the first channel, if this rank holds one range of channels; or
            the indices of all channels, in a shape that broadcasts to that of the channels.

    Raises:
        LayoutError: `p` is out of range, or the key has another shape.
    """
    if not 0.0 <= p < 1.0:
        raise LayoutError(f"dropout probability {p} is not in 0 <= p < 1")
    if p == 0.0:
        return x
    _require_shape(x.shape, key)
    key, numbers = key.of_site(p, layer=layer, site=site)
    result: Tensor = _Dropout.apply(  # type: ignore[no-untyped-call]
        x, key.word0, key.word1, channels, DropoutSite(*numbers)
    )
    return result


def keep_mask(
    shape: tuple[int, ...],
    p: float,
    key: DropoutKey,
    *,
    layer: int,
    site: int,
    channels: int | Int[Tensor, "..."] = 0,
) -> Bool[Tensor, "s b *channels"]:
    """Returns the mask of `keyed_dropout` for a tensor of `shape`; True for elements it keeps."""
    _require_shape(shape, key)
    return _dropped(
        shape, key.word0, key.word1, channels, DropoutSite.of(p, layer, site)
    ).logical_not_()


@dataclass(frozen=True, eq=False)
class KeptWords:
    """Words that are 1 for elements `keyed_dropout` keeps and 0 for others, for parts of a mask.

    What depends on the channel or the token alone is computed once, by `of`. On a CPU, an integer
    product of these words and those of a tensor (`Tensor.view`) takes a tenth of the time that
    filling the tensor under a boolean mask takes.

    Attributes:
        channels: Hashes of the channels, `[..., 1, t]`.
        word0: First words of the tokens, `[..., s, 1]`.
        word1: Second words of the tokens.
        least: Smallest hash that keeps an element.
    """

    channels: Int32[Tensor, "*#dims 1 t"]
    word0: Int32[Tensor, "*#dims s 1"]
    word1: Int32[Tensor, "*#dims s 1"]
    least: int

    @classmethod
    def of(
        cls,
        channels: Int[Tensor, "*#dims t"],
        word0: Int32[Tensor, "*#dims s"],
        word1: Int32[Tensor, "*#dims s"],
        p: float,
        *,
        layer: int | Tensor,
        site: int,
    ) -> "KeptWords":
        """Returns the words of each token and channel.

        Args:
            channels: Global indices of the channels.
            word0: First words of the key, in a shape that broadcasts with that of the channels.
            word1: Second words of the key.
            p: Probability of dropping an element.
            layer: Global index of the layer.
            site: Index of the call of `keyed_dropout` in the layer.
        """
        at = DropoutSite.of(p, layer, site)
        first, second = at.applied_to(word0, word1)
        rows = folded(first).unsqueeze(-1), second.unsqueeze(-1)
        return cls(folded(low(channels)).unsqueeze(-2), *rows, at.least)

    def part(self, tokens: slice, channels: slice) -> Int32[Tensor, "*dims s t"]:
        """Returns the words of some tokens and channels."""
        rows = [word[..., tokens, :] for word in (self.word0, self.word1)]
        # In place, a comparison gives integers.
        words: Tensor = mixed(self.channels[..., channels] ^ rows[0], rows[1]).ge_(self.least)
        return words


def keyed_uniform(
    shape: tuple[int, ...],
    key: DropoutKey,
    *,
    layer: int | Int64[Tensor, ""],
    site: int,
    dtype: torch.dtype,
    channels: int | Int[Tensor, "..."] = 0,
) -> Float[Tensor, "s b *channels"]:
    """Returns noise, uniform between 0 and 1, which is the same for every layout.

    Args:
        shape: Shape ``[s, b, ...]`` of the result.
        key: Key of the same `[s, b]`.
        layer: Global index of the layer.
        site: Index of the call in the layer, other than those of `keyed_dropout`.
        dtype: Data type of the result, float32 or float64.
        channels: Global index of the first channel, or the indices of all channels.

    Raises:
        LayoutError: The key has another shape.
    """
    _require_shape(shape, key)
    key, numbers = key.of_site(0.0, layer=layer, site=site)
    bits = _element_bits(shape, key.word0, key.word1, channels, DropoutSite(*numbers))
    return (bits.to(dtype) + WORD // 2) / WORD


class DropoutFusion(NamedTuple):
    """Whether `keyed_dropout` is one kernel on a device.

    Attributes:
        fused: Whether it is.
        reason: Why it is not; empty if it is.
    """

    fused: bool
    reason: str = ""

    def __str__(self) -> str:
        return "dropout is one kernel" if self.fused else f"dropout is not fused: {self.reason}"


@cache
def dropout_fusion(device: torch.device) -> DropoutFusion:
    """Returns whether `keyed_dropout` is compiled into one kernel on a device, or why it is not.

    The first call for a GPU compiles it for a small tensor and compares all bits with those of
    torch's operations, which takes seconds. Functions that a caller compiles include dropout on
    every device.
    """
    if device.type == "cpu":
        return DropoutFusion(False, "on a CPU it runs in slices that fit into the cache")
    reason = _compat.why_not_compiled()
    if reason is not None:
        return DropoutFusion(False, reason)
    x = torch.linspace(-1, 1, 256, device=device).view(4, 2, 32)
    words = torch.arange(16, dtype=torch.int32, device=device).view(2, 4, 2)
    operands = x, words[0], words[1], 5, DropoutSite.of(0.25, 3, 2)
    try:
        equal = torch.equal(_fused(*operands), _eager(*operands))
    except Exception as error:  # noqa: BLE001 - a compiler can fail in any way
        text = " ".join(str(error).split())[:200]
        return DropoutFusion(False, f"torch.compile fails: {type(error).__name__}: {text}")
    if not equal:
        return DropoutFusion(False, f"torch {torch.__version__} compiles it to other bits")
    return DropoutFusion(True)


class _Dropout(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, word0: Tensor, word1: Tensor, channels: int | Tensor, site: DropoutSite
    ) -> Tensor:
        tensor = channels if isinstance(channels, Tensor) else None
        ctx.save_for_backward(word0, word1, tensor)
        ctx.first = None if isinstance(channels, Tensor) else channels
        ctx.site = site
        return _drop(x, word0, word1, channels, site)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        word0, word1, tensor = ctx.saved_tensors
        channels = tensor if ctx.first is None else ctx.first
        return _drop(grads[0], word0, word1, channels, ctx.site), None, None, None, None


def _drop(
    x: Tensor, word0: Tensor, word1: Tensor, channels: int | Tensor, site: DropoutSite
) -> Tensor:
    """Returns the scaled `x` with zeros. On a CPU, in slices that fit into the cache."""
    if torch.compiler.is_compiling():
        return _scaled(x, word0, word1, channels, site.word0, site.word1, site.least, site.scale)
    if x.device.type == "cpu":
        return _in_slices(x, word0, word1, channels, site)
    run = _fused if dropout_fusion(x.device).fused else _eager
    return run(x, word0, word1, channels, site)


def _in_slices(
    x: Tensor, word0: Tensor, word1: Tensor, channels: int | Tensor, site: DropoutSite
) -> Tensor:
    result = torch.empty_like(x)
    numbers = _numbers(x.shape, channels, x.device)
    rows = max(1, _SLICE // max(1, x[:1].numel()))
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        _eager(x[part], word0[part], word1[part], numbers, site, result[part])
    return result


def _eager(
    x: Tensor,
    word0: Tensor,
    word1: Tensor,
    channels: int | Tensor,
    site: DropoutSite,
    result: Tensor | None = None,
) -> Tensor:
    dropped = _dropped(x.shape, word0, word1, channels, site)
    return torch.mul(x, site.scale, out=result).masked_fill_(dropped, 0.0)


def _fused(
    x: Tensor, word0: Tensor, word1: Tensor, channels: int | Tensor, site: DropoutSite
) -> Tensor:
    enumerated = isinstance(channels, Tensor)
    run = _compiled(x.dtype, x.dim(), x.is_contiguous(), enumerated, site.least, site.scale)
    result: Tensor = run(x.detach(), word0, word1, channels, site.word0, site.word1)
    return result


@cache
def _compiled(
    dtype: torch.dtype, dims: int, contiguous: bool, enumerated: bool, least: int, scale: float
) -> Any:
    """Returns the compiled `_scaled` for tensors of one kind.

    torch limits how often it compiles the code of one function, so each kind has a copy of it.
    """
    name = f"_scaled_{dims}_{dtype}_{contiguous}_{enumerated}".replace(".", "_")
    code = _scaled.__code__.replace(co_name=name)
    copy = FunctionType(code, _scaled.__globals__, name, (least, scale))
    return torch.compile(copy, dynamic=True, fullgraph=True)


def _scaled(
    x: Tensor,
    word0: Tensor,
    word1: Tensor,
    channels: int | Tensor,
    site0: int,
    site1: int,
    least: int,
    scale: float,
) -> Tensor:
    """Returns the scaled `x` with zeros, for a compiler."""
    # Not in place: torch 2.11 compiles in-place changes to a result without gradient.
    site = DropoutSite(site0, site1, least, scale)
    dropped = _dropped(x.shape, word0, word1, channels, site)
    return torch.mul(x, scale).masked_fill(dropped, 0.0)


def _dropped(
    shape: tuple[int, ...], word0: Tensor, word1: Tensor, channels: int | Tensor, site: DropoutSite
) -> Tensor:
    """Returns whether the hash of each element, as a fraction of 2^32, is less than `p`."""
    return _element_bits(shape, word0, word1, channels, site) < site.least


def _element_bits(
    shape: tuple[int, ...], word0: Tensor, word1: Tensor, channels: int | Tensor, site: DropoutSite
) -> Tensor:
    """Returns the hash of each element, as int32."""
    numbers = _numbers(shape, channels, word0.device)
    rows = (..., *(None,) * numbers.dim())
    return bits(numbers, (word0 + site.word0)[rows], (word1 ^ site.word1)[rows])


def _numbers(shape: tuple[int, ...], channels: int | Tensor, device: torch.device) -> Tensor:
    """Returns the indices of the channels of a tensor `[s, b, ...]`, int32 modulo 2^32."""
    if isinstance(channels, Tensor):
        return low(channels)
    numbers = torch.arange(prod(shape[2:]), dtype=torch.int32, device=device)
    return (numbers + signed(channels) if channels else numbers).view(shape[2:])


def _require_shape(shape: tuple[int, ...], key: DropoutKey) -> None:
    if shape[:2] != key.word0.shape:
        raise LayoutError(
            f"dropout of shape {tuple(shape)} with a key for {tuple(key.word0.shape)}: the first "
            "two dims must be sequence and micro-batch"
        )
