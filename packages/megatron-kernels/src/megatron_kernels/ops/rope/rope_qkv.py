"""The rotation of queries and keys in the output of a fused projection."""

from jaxtyping import Float
from torch import Tensor

from megatron_kernels.errors import KernelError
from megatron_kernels.ops.rope import rope as rotation
from megatron_kernels.ops.rope import triton
from megatron_kernels.ops.triton_op import triton_backend
from megatron_kernels.registry import AUTO, Backend, accept_all, op


def split_heads(
    fused: Float[Tensor, "s b g roles d"],
) -> tuple[Float[Tensor, "s b n d"], Float[Tensor, "s b g d"], Float[Tensor, "s b g d"]]:
    """Returns queries, keys and values of a fused projection; views if they can be."""
    queries = fused.shape[3] - 2
    q, k, v = fused[..., :queries, :], fused[..., queries, :], fused[..., queries + 1, :]
    return q.flatten(2, 3), k, v


def _repeated(q: Tensor, k: Tensor, v: Tensor, repeat: bool) -> tuple[Tensor, Tensor, Tensor]:
    if repeat:
        k, v = (t.expand(-1, -1, q.shape[2], -1) for t in (k, v))
    return q, k, v


def reference(
    fused: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, repeat: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits, then rotates by the definition."""
    q, k, v = split_heads(fused)
    q, k = (rotation.reference(x, cos, sin, interleaved) for x in (q, k))
    return _repeated(q, k, v, repeat)


def direct(
    fused: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, repeat: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits, then rotates queries and keys by real arithmetic; values are a view."""
    q, k, v = split_heads(fused)
    q, k = (rotation.direct(x, cos, sin, interleaved) for x in (q, k))
    return _repeated(q, k, v, repeat)


@op(
    triton_backend(
        triton.rope_qkv, triton.unsupported_reason, "one kernel of ours each way, saves nothing"
    ),
    Backend("torch", direct, accept_all, "real arithmetic on halves of queries and keys"),
    Backend("reference", reference, accept_all, "complex multiplication, in float32 or float64"),
)
def rope_qkv(
    fused: Float[Tensor, "s b g roles d"],
    cos: Float[Tensor, "s b_or_1 half"],
    sin: Float[Tensor, "s b_or_1 half"],
    interleaved: bool = False,
    repeat: bool = False,
    *,
    backend: str = AUTO,
) -> tuple[Float[Tensor, "s b n d"], Float[Tensor, "s b kv d"], Float[Tensor, "s b kv d"]]:
    """Separates a fused projection into queries, keys and values, and rotates the first two.

    Args:
        fused: Output of the projection `[s, b, g, m + 2, d]`: for each of g query groups the heads
            of m queries, then a key and a value.
        cos: Cosines `[s, b or 1, r/2]` from `rope_tables`, r <= d.
        sin: Sines of the same shape.
        interleaved: As for `rope`.
        repeat: Whether to repeat keys and values for all heads, as views, if there is one group.
            Then the backward pass sums their gradients itself, not one for each of them.
        backend: "auto" or the name of one backend.

    Returns:
        Queries `[s, b, g * m, d]`, keys and values `[s, b, g, d]`, or `[s, b, m, d]` if repeated,
        in the dtype of `fused`.

    Raises:
        KernelError: Keys and values of several groups are to be repeated.
    """
    if repeat and fused.shape[2] != 1:
        raise KernelError(f"rope_qkv repeats the keys of one group, not of {fused.shape[2]}")
    return rope_qkv.run(backend, fused, cos, sin, interleaved, repeat)
