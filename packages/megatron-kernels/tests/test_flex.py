"""FlexAttention against the reference, in a process without checks of annotations.

torch traces the mask and the score function even without compiling, which it cannot do with checked
functions.
"""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
from megatron_kernels import Mask, Scores, attention
from megatron_kernels.ops.attention import flex
from megatron_kernels.ops.attention.call import AttentionCall
from torch.nn.attention.flex_attention import flex_attention

how = sys.argv[1]
if how == "two caps":
    flex.compiled = lambda device, on_gpus=torch.compile(flex_attention): on_gpus
elif how != "compiled":
    # Kernels for CPUs cannot be compiled for sizes that vary.
    options, devices, true = [], [], torch.compile
    torch.compile = lambda function, **given: options.append(given) or function
    for device in ("cpu", "cuda"):
        flex.compiled(device)
    torch.compile = true
    assert options == [{"dynamic": False}, {"dynamic": None}]
    flex.compiled = lambda device: devices.append(device) or flex_attention
torch.manual_seed(2)
ids = torch.tensor([[0] * 3 + [1] * 6, [4] * 4 + [2] * 2 + [-1] * 3], dtype=torch.int32)
order = torch.arange(9, dtype=torch.int32)
masks = [
    Mask(), Mask(causal=False), Mask(window=3), Mask(causal=False, window=3),
    Mask(document_ids=ids), Mask(document_ids=ids, causal=False, window=2),
    Mask(prefix=torch.tensor([2, 5])), Mask(chunk=4),
    Mask(positions=torch.stack((order.flip(0), order.roll(4)))),
]
q, k, v = (torch.randn(9, 2, heads, 16) for heads in (4, 2, 2))
slopes, sinks = torch.tensor([0.5, 0.25, 0.1, 0.0]), torch.tensor([0.3, -1.0, 2.0, 0.0])
bias = torch.randn(2, 4, 9, 9)
scores = [
    Scores(), Scores(scale=0.3, softcap=2.0), Scores(slopes=slopes), Scores(sinks=sinks),
    Scores(bias=bias), Scores(bias=bias[:1], slopes=slopes, sinks=sinks, softcap=3.0),
]
some = [
    (masks[4], scores[-1]), (masks[0], scores[1]), (masks[1], scores[4]), (masks[6], scores[3]),
    (masks[8], scores[2]),
]
caps = [(masks[0], Scores(softcap=cap)) for cap in (2.0, 3.0)]
chosen = {"some masks": some, "compiled": [(masks[4], scores[1])], "two caps": caps}
for mask, each in chosen.get(how, [(mask, each) for mask in masks for each in scores]):
    found = flex.flex(AttentionCall(q, k, v, mask, each))
    expected = attention(q, k, v, mask, each, backend="reference")
    torch.testing.assert_close(found, expected)
for each in (scores[2],):  # two queries that continue a cache with unused room
    found = flex.flex(AttentionCall(q[:2], k, v, Mask(), each, 5))
    expected = attention(q[:2], k, v, Mask(), each, query_offset=5, backend="reference")
    torch.testing.assert_close(found, expected)
assert how in ("compiled", "two caps") or set(devices) == {"cpu"}
"""


SLOW = [pytest.param(how, marks=pytest.mark.slow) for how in ("everything", "compiled", "two caps")]


@pytest.mark.parametrize("how", ["some masks", *SLOW])
def test_flex_attention_equals_the_reference(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
