"""The object that backends of attention take: options that a backend refuses, and its methods."""

import math

import pytest
import torch
from megatron_kernels import AttentionCall, Backend, KernelError, Mask, Op, Scores, attention
from megatron_kernels import attention_backward as gradients_of_block
from megatron_kernels import attention_forward as block
from torch import Tensor

SUPPORTED = {
    "flash_attn": {"softcap", "slopes"},
    "flash_attn_3": {"softcap"},
    "torch": {"a bias"},
    "flex": {"sinks", "softcap", "slopes", "a bias"},
    "triton": {"sinks", "softcap", "slopes"},
    "tiles": set(),
    "batch-invariant": {"softcap"},
    "reference": {"dropout", "sinks", "softcap", "slopes", "a bias"},
}
"""Options of each backend beside a scale, as the docs name them; flash-attn and torch have others
of dropout, and tiles and Triton kernels take a dropout of their own protocol."""

OPTIONS = {
    "sinks": Scores(sinks=torch.zeros(2)),
    "softcap": Scores(softcap=2.0),
    "slopes": Scores(slopes=torch.zeros(2)),
    "a bias": Scores(bias=torch.zeros(1, 2, 3, 5)),
}


class Halved:
    """Dropout that tiles take."""

    probability = 0.5

    def __call__(self, p: Tensor) -> Tensor:
        return p

    def kept(self, samples: slice, heads: slice, length: int) -> object:
        raise AssertionError("only choosing a backend is tested")


def call_of(**options: object) -> AttentionCall:
    q, k = torch.randn(3, 1, 2, 4), torch.randn(5, 1, 2, 4)
    return AttentionCall(q, k, k, Mask(causal=False), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", OPTIONS)
def test_each_backend_refuses_the_options_that_it_does_not_name(option: str) -> None:
    assert [backend.name for backend in attention.backends] == list(SUPPORTED)
    with torch.no_grad():
        for backend in attention.backends:
            dropout = Halved() if backend.name == "tiles" else None
            reason = backend.unsupported_reason(call_of(scores=OPTIONS[option], dropout=dropout))
            if backend.name == "flex" and option == "sinks":
                assert reason == "on a CPU it does not support sinks"
            else:
                refused = reason == f"it does not support {option}"
                assert refused == (option not in SUPPORTED[backend.name]), backend.name


def test_dropout_of_all_probabilities_is_refused_by_all_but_the_reference() -> None:
    for backend in attention.backends:
        reason = backend.unsupported_reason(call_of(dropout=lambda p: p))
        assert (reason is None) == (backend.name == "reference")
        assert reason is None or "dropout" in reason


def test_both_passes_of_a_block_have_the_same_reasons() -> None:
    call = call_of(scores=OPTIONS["slopes"])
    for forward, backward in zip(block.backends, gradients_of_block.backends, strict=True):
        found = backward.unsupported_reason(call, call.q, call.q, call.q[..., 0])
        assert found == forward.unsupported_reason(call), forward.name


def test_an_operation_with_another_backend_of_attention_gives_it_the_call() -> None:
    seen: list[AttentionCall] = []

    def mine(call: AttentionCall) -> Tensor:
        seen.append(call)
        return call.q

    own = Backend("mine", mine, lambda call: call.unsupported_option("softcap"), "")
    extended = Op(attention.signature, (own, *attention.backends), attention.given)
    call = call_of(scores=Scores(softcap=3.0), query_offset=2)
    assert extended.explain(*call).backend == "mine"
    assert extended.run("auto", *extended.given(*call)) is call.q
    assert len(seen) == 1 and all(one is other for one, other in zip(seen[0], call, strict=True))


def test_methods_are_what_the_fields_say() -> None:
    call = call_of(query_offset=1)
    assert call.scale() == 1 / math.sqrt(4) and call.extent() == (3, 5, 1)
    assert call._replace(scores=Scores(scale=0.3)).scale() == 0.3
    assert call.lower_mask() == (None, False) and bool(call.allowed().all())
    with pytest.raises(KernelError, match="2 heads do not divide over 3 query groups"):
        call._replace(k=torch.zeros(5, 1, 3, 4)).check_shapes()


@pytest.mark.parametrize(
    ("mask", "keys"),
    [
        (Mask(), 4),
        (Mask(window=2), 4),
        (Mask(prefix=5), 5),
        (Mask(causal=False), 5),
        (Mask(causal=False, prefix=2), 5),
        (Mask(dense=torch.ones(1, 3, 5, dtype=torch.bool)), 5),
        (Mask(positions=torch.arange(5).flip(0)[None]), 5),
    ],
    ids=lambda value: str(value)[:30],
)
def test_unused_keys_are_those_after_the_last_query(mask: Mask, keys: int) -> None:
    bias = torch.randn(1, 2, 3, 5)
    call = call_of(scores=Scores(bias=bias), query_offset=1)._replace(mask=mask)
    found = call.without_unused_keys()
    assert len(found.k) == len(found.v) == keys == found.scores.bias.shape[3]
    assert found.extent() == (3, keys, 1)
    assert torch.equal(found.scores.bias, bias[..., :keys])
    assert not call.allowed()[..., keys:].any()
