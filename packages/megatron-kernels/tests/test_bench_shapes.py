"""The calls that the benchmark measures: shapes of a layer, as `workload` describes it."""

from typing import Any

import pytest
import torch
from megatron_kernels import Quantized
from megatron_kernels.inputs import InputGenerator
from megatron_kernels.low_precision_workloads import LOW_PRECISION_WORKLOADS
from megatron_kernels.workload import EXPERTS, HEAD, Shape, Workload
from megatron_kernels.workloads import WORKLOADS
from torch import Tensor

TOKENS, WIDTH, VOCABULARY = 128, 256, 512
HEADS, WIDE, ROWS = 4, 4 * WIDTH, 2 * TOKENS  # channels of 64, and two experts for each token
TINY = Shape(TOKENS, WIDTH, VOCABULARY)
STREAM = (TOKENS, 1, WIDTH)
OF_HEADS = (TOKENS, 1, HEADS, 64)
TABLES = [(TOKENS, 1, 32)] * 2
GATED = (TOKENS, 1, 2, WIDE)
QUANTIZED = [(TOKENS, WIDTH), (WIDE, WIDTH)]
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "layer_norm": [STREAM, (WIDTH,), (WIDTH,)],
    "rms_norm": [STREAM, (WIDTH,)],
    "add_layer_norm": [STREAM, STREAM, (WIDTH,), (WIDTH,)],
    "add_rms_norm": [STREAM, STREAM, (WIDTH,)],
    "bias_dropout_add": [STREAM, STREAM, (TOKENS, 1), (TOKENS, 1)],
    "bias_gelu, tanh": [(TOKENS, 1, WIDE), (WIDE,)],
    "bias_swiglu": [GATED, (2, WIDE)],
    "gelu, tanh": [(TOKENS, 1, WIDE)],
    "swiglu": [GATED],
    "softmax": [(HEADS, 256, TOKENS)],
    "rope": [OF_HEADS, *TABLES],
    "rope_qkv": [(TOKENS, 1, HEADS // 2, 2 + 2, 64), *TABLES],
    "vocab_embedding": [(VOCABULARY, WIDTH), (TOKENS,)],
    "attention, decode, 16 sequences": [(1, 16, HEADS, 64), *[(TOKENS, 16, HEADS, 64)] * 2],
    "paged_attention, decode, 16 sequences": [
        (1, 16, HEADS, 64),
        *[(16 * TOKENS // 16, 16, HEADS, 64)] * 2,
    ],
    "linear": [STREAM, (WIDE, WIDTH)],
    "cross_entropy": [(TOKENS, VOCABULARY), (TOKENS,)],
    "vocab_cross_entropy": [(TOKENS, VOCABULARY), (TOKENS,)],
    "vocab_cross_entropy_gradient": [(TOKENS, VOCABULARY), *[(TOKENS,)] * 3],
    "grouped_matmul": [(ROWS, WIDTH), (8, WIDTH, WIDTH), (8,)],
    "permute": [(TOKENS, WIDTH), (ROWS,)],
    "unpermute": [(ROWS, WIDTH), (ROWS,), (TOKENS, 2)],
    "causal_conv": [STREAM, (WIDTH, 4), (WIDTH,)],
    "causal_conv, decode, 16 sequences": [(1, 16, WIDTH), (WIDTH, 4), (WIDTH,), (16, 3, WIDTH)],
    "ssd_scan": [OF_HEADS, (TOKENS, 1, HEADS), (HEADS,), *[(TOKENS, 1, 1, 64)] * 2],
    "ssd_scan, decode, 16 sequences": [
        (1, 16, HEADS, 64),
        (1, 16, HEADS),
        (HEADS,),
        *[(1, 16, 1, 64)] * 2,
        (16, HEADS, 64, 64),
    ],
    "gated_delta_rule": [*[OF_HEADS] * 3, *[(TOKENS, 1, HEADS)] * 2],
    "quantize_tensor, own scale": [(TOKENS, WIDTH)],
    "quantize_tensor, given scale": [(TOKENS, WIDTH), ()],
    **{f"quantized_matmul, {kind}": QUANTIZED for kind in ("fp8", "fp8, e5m2", "int8", "mxfp8")},
    "quantized_grouped_matmul, fp8": [(ROWS, WIDTH), (), (8, WIDTH, WIDTH), (), (8,)],
    "quantized_grouped_gradient, fp8": [(ROWS, WIDTH), (), (ROWS, WIDTH), (), (8,)],
}


def given(workload: Workload) -> dict[str, Any]:
    """Returns the arguments of a call by name."""
    arguments = workload.arguments(InputGenerator(torch.float32, torch.device("cpu")), TINY)
    return dict(zip(workload.op.signature.__annotations__, arguments, strict=False))


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each.title)
def test_a_call_has_the_shapes_of_a_layer(workload: Workload) -> None:
    found = [tuple(x.shape) for x in given(workload).values() if isinstance(x, Tensor | Quantized)]
    expected = SHAPES.get(workload.title)
    if expected is None:  # all other calls of attention
        groups = HEADS // 4 if "grouped" in workload.label else HEADS
        assert workload.op.name == "attention"
        expected = [OF_HEADS, *[(TOKENS, 1, groups, 64)] * 2]
    assert found == expected


def test_all_calls_are_those_above() -> None:
    assert SHAPES.keys() <= {each.title for each in WORKLOADS}
    assert set(LOW_PRECISION_WORKLOADS) <= set(WORKLOADS)
    assert (HEAD, EXPERTS, TINY.heads) == (64, 8, HEADS)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each.title)
def test_numbers_of_a_call_are_those_of_a_model(workload: Workload) -> None:
    found = given(workload)
    for name in ("zero_centered", "interleaved", "repeat", "has_tail", "overwrites"):
        assert not found.get(name)
    if "counts" in found:  # equal groups of all rows
        assert found["counts"].tolist() == [ROWS // 8] * 8
    if workload.op.name == "ssd_scan":
        assert (found["a"] < 0).all()  # states decay
        assert found.get("state", torch.zeros(())).dtype == torch.float32
    if workload.op.name == "gated_delta_rule":
        assert (found["log_decay"] <= 0).all() and found["l2_norm"]
        assert ((found["beta"] > 0) & (found["beta"] < 1)).all()
    if workload.title == "vocab_cross_entropy_gradient":  # of probabilities, which are below 1
        assert (found["lse"] > 4).all() and found["valid"] == VOCABULARY
    if "scale" in found and isinstance(found["scale"], Tensor) and "x" in found:
        largest = found["x"].abs().max() / found["scale"]
        assert 448 / 2 < largest < 448 * 2  # the numbers of E4M3 are used
    if "order" in found:
        assert sorted(found["order"].tolist()) == list(range(ROWS))
    if workload.op.name in ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"):
        assert found["eps"] == 1e-5
