"""How often the host waits in a step with experts, and that compiled graphs of experts are whole.

One rank of an imagined job runs forward and backward pass: tensors on "cuda" without values, whose
ledger counts every wait. The device has to be imagined before torch is imported, and Dynamo cannot
trace functions under the annotation hook, so each test runs in a process of its own.
"""

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

LAYERS, MICRO_BATCHES = 2, 2

WAITS = f"""
import json, sys
from megatron_parallel.imagined import NoGuardError, load_guard

try:
    load_guard()
except NoGuardError as error:
    sys.exit(f"no simulated device: {{error}}")
import torch
from megatron_models import GPT, GPTConfig, Placement
from megatron_parallel import AuxiliaryLosses, Mesh, ParallelLayout
from megatron_parallel.imagined import imagined_device

found = []
for layout, sequence_parallel, dispatcher, changes in json.load(sys.stdin):
    with (
        Mesh.imagined(ParallelLayout(**layout), 3, device="cuda") as mesh,
        imagined_device("cuda") as ledger,
    ):
        settings = dict(num_layers={LAYERS}, hidden_size=64, num_attention_heads=4, vocab_size=128)
        settings |= dict(max_position_embeddings=64, ffn_hidden_size=64, num_experts=8)
        settings |= dict(moe_router_topk=2, moe_shared_expert_intermediate_size=64)
        config = GPTConfig(**settings, **changes)
        model = GPT(
            config,
            Placement(
                mesh,
                dtype=torch.bfloat16,
                sequence_parallel=sequence_parallel,
                dispatcher=dispatcher,
            ),
        )
        tokens = torch.zeros(2, 64, dtype=torch.int64, device=mesh.device)
        ledger.clear()
        for _ in range({MICRO_BATCHES}):
            losses = AuxiliaryLosses(dict.fromkeys(config.auxiliary_losses, 1.0))
            model(tokens, labels=tokens, auxiliary_losses=losses).sum().backward()
    found.append([ledger.waits, ledger.blocking_copies])
print(json.dumps(found))
"""

SHARED = {"tp": 2, "ep": 4, "etp": 1, "dp": 8}
CUT = {"tp": 2, "ep": 2, "dp": 4}
LOSS = {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.01}
BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
ROOM = {"moe_expert_rank_capacity_factor": 1.5}
PADDED = {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True}
CHOICE = {"moe_router_expert_choice": True, "moe_router_pre_softmax": True}
NONE = [
    (SHARED, True, "allgather", LOSS),
    (CUT, False, "allgather", BIASED),
    (SHARED, True, "allgather", {"moe_expert_capacity_factor": 1.5}),
    (SHARED, True, "allgather", CHOICE),
    (SHARED, True, "allgather", {**ROOM, "activation": "swiglu", "add_bias_linear": False}),
    ({"dp": 4}, False, "alltoall", LOSS),
    (SHARED, True, "alltoall", ROOM),
    (CUT, True, "alltoall", {**ROOM, **LOSS}),
    (SHARED, True, "alltoall", PADDED),
]
ONE = [
    (SHARED, True, "alltoall", LOSS),
    (CUT, True, "alltoall", BIASED),
    (SHARED, True, "alltoall", {"moe_expert_capacity_factor": 1.5}),
    (SHARED, True, "alltoall", CHOICE),
]
SAMPLE = [
    (CUT, False, "allgather", BIASED),
    (SHARED, True, "allgather", CHOICE),
    ({"dp": 4}, False, "alltoall", LOSS),
    (SHARED, True, "alltoall", PADDED),
    (CUT, True, "alltoall", {**ROOM, **LOSS}),
    (SHARED, True, "alltoall", LOSS),
    (CUT, True, "alltoall", BIASED),
]


def run(script: str, given: Any) -> Any:
    """Returns what a script prints; skips the test if no device can be simulated."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if missing := re.search("no simulated device: .*", done.stderr):
        pytest.skip(missing[0])  # no compiler, or a GPU: the line says which
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "cases",
    [SAMPLE, pytest.param([*NONE, *ONE], marks=pytest.mark.slow)],
    ids=["sample", "all"],
)
def test_the_host_waits_once_for_each_layer_if_rows_are_sent_as_they_are_and_else_never(cases):
    found = run(WAITS, cases)
    for case, (waits, copies) in zip(cases, found, strict=True):
        expected = LAYERS * MICRO_BATCHES if case in ONE else 0
        assert sum(waits.values()) == expected, (case, waits)
        assert all("host_copy" in line for line in waits), (case, waits)
        assert copies == {}, case


GRAPHS = """
import json, sys
import torch
from megatron_models import GPT, GPTConfig, Placement
from megatron_parallel import AuxiliaryLosses, Mesh
from torch._inductor import config as inductor

inductor.emulate_precision_casts = True  # other rounding would select other experts
torch.manual_seed(5)
found = []
for dispatcher, changes in json.load(sys.stdin):
    settings = dict(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=97)
    settings |= dict(max_position_embeddings=16, ffn_hidden_size=64, num_experts=4)
    settings |= dict(moe_router_topk=2, moe_shared_expert_intermediate_size=32)
    config = GPTConfig(**settings, **changes)
    model = GPT(config, Placement(Mesh.single(), dtype=torch.bfloat16, dispatcher=dispatcher))
    tokens = torch.randint(97, (2, 16))

    def sums_and_gradient(run):
        losses = AuxiliaryLosses(dict.fromkeys(config.auxiliary_losses, 32.0))
        model.zero_grad()
        for _ in range(2):  # micro-batches
            run(tokens, labels=tokens, auxiliary_losses=losses).sum().backward()
        router = model.get_parameter("layers.0.mlp.router.weight")
        return {name: float(value) for name, value in losses.sums.items()}, router.grad.tolist()

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True)
    found.append([sums_and_gradient(compiled), sums_and_gradient(model)])
print(json.dumps(found))
"""


GATED = ("allgather", {"activation": "swiglu", "add_bias_linear": False, **LOSS})
BOUNDED = ("alltoall", {**ROOM, **LOSS, **BIASED})


@pytest.mark.slow  # megatron-models compiles experts in the default tests
def test_experts_compile_as_one_graph_with_the_same_losses():
    cases = [GATED, BOUNDED, ("alltoall", PADDED), ("allgather", CHOICE)]
    for case, (ours, eager) in zip(cases, run(GRAPHS, cases), strict=True):
        assert ours[0] == pytest.approx(eager[0], rel=1e-3), case
        for row, other in zip(ours[1], eager[1], strict=True):
            assert row == pytest.approx(other, rel=0.05, abs=1e-3), case
