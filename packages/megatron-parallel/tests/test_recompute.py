"""Saved activations: recomputed, sharded over an axis, or offloaded to host memory."""

import pytest
import torch
from megatron_parallel import LayoutError, Mesh, ParallelLayout, RecomputeConfig
from megatron_parallel.recompute import (
    LayerGroup,
    OffloadSavedTensors,
    ShardSavedTensors,
    activation_checkpoint,
    count_saved_activations,
    discard_output,
    discard_outputs,
)
from torch import nn


def test_groups_of_layers():
    def full(method, count):
        return RecomputeConfig(granularity="full", method=method, num_layers=count)

    assert full("uniform", 4).groups(range(10, 19)) == (
        LayerGroup((10, 11, 12, 13), True),
        LayerGroup((14, 15, 16, 17), True),
        LayerGroup((18,), True),
    )
    blocks = full("block", 5).groups(range(8))
    assert [group.checkpointed for group in blocks] == [True] * 5 + [False] * 3
    assert [group.layers for group in blocks] == [(i,) for i in range(8)]
    assert not any(
        group.checkpointed for group in RecomputeConfig(granularity="selective").groups(range(3))
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"granularity": "full"},
            "granularity full needs method and num_layers of at least 1, got neither",
        ),
        ({"granularity": "full", "method": "block"}, "of at least 1, got method block$"),
        (
            {"granularity": "full", "method": "block", "num_layers": 0},
            "of at least 1, got method block and num_layers 0$",
        ),
        ({"method": "uniform"}, "method uniform needs whole layers: add granularity full"),
        ({"num_layers": 3}, "num_layers 3 needs whole layers"),
        ({"distribute_saved_activations": True}, "distribute_saved_activations needs whole"),
        ({"modules": ("moe_act",)}, "modules moe_act is unknown: use core_attn, mlp, moe"),
        ({"cpu_offloading_num_layers": -1}, "cpu_offloading_num_layers -1 is negative"),
        (
            {
                "granularity": "selective",
                "modules": ("layernorm",),
                "cpu_offloading_num_layers": 1,
            },
            "cannot offload what modules layernorm saves",
        ),
    ],
)
def test_contradictions_are_refused(given, message):
    with pytest.raises(LayoutError, match=message):
        RecomputeConfig(**given)


def test_sharded_activations_are_refused_where_every_rank_has_a_slice_already():
    plan = RecomputeConfig(
        granularity="full", method="uniform", num_layers=1, distribute_saved_activations=True
    )
    plan.check(ParallelLayout(tp=2, dp=1), sequence_parallel=False)
    with pytest.raises(LayoutError, match="with sequence parallelism every rank has only"):
        plan.check(ParallelLayout(tp=2, dp=1), sequence_parallel=True)


def test_a_function_is_recomputed_once_and_only_its_input_is_saved():
    runs = []
    layer = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()

    def run(x):
        runs.append(1)
        return layer(x)

    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    with count_saved_activations(layer) as kept:
        y = activation_checkpoint(run, x)
    assert (kept.shapes, len(runs)) == ([(3, 8)], 1)
    y.sum().backward()
    assert len(runs) == 2
    again, x.grad = x.grad, None
    layer(x).sum().backward()
    assert torch.equal(again, x.grad)
    with torch.no_grad():
        activation_checkpoint(run, x)
    assert len(runs) == 3


def test_an_output_is_recomputed_for_its_reader_alone():
    norm, reader = nn.LayerNorm(8).double(), nn.Linear(8, 4).double()
    x = torch.randn(3, 2, 8, dtype=torch.float64, requires_grad=True)
    both = nn.ModuleList([norm, reader])

    def run(forget):
        y = norm(x)
        with discard_output(y, lambda: norm(x)) if forget else count_saved_activations(both):
            return (reader(y) ** 2).sum()

    with count_saved_activations(both) as kept:
        run(forget=True).backward()
    # The norm's input and its two statistics, and what is squared; not the norm's output.
    assert kept.shapes == [(3, 2, 8), (3, 2, 1), (3, 2, 1), (3, 2, 4)]
    again, x.grad = x.grad, None
    run(forget=False).backward()
    assert torch.equal(again, x.grad)


def test_outputs_are_recomputed_together_from_inputs_that_outer_hooks_save():
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    linear = nn.Linear(8, 8).double()
    calls = []

    def project(rows):
        calls.append(torch.is_grad_enabled())
        y = linear(rows)
        return y * 2, y + 3, y - 1  # operations that save nothing

    def run():
        h = x * 1.5
        a, b, unread = project(h)
        with discard_outputs((a, b, unread), project, h):
            product = a * b
        return product.sum() + unread.sum()

    with count_saved_activations(linear) as kept:
        loss = run()
    # The matrix product saves its input, which is the input of the recomputation too.
    assert kept.shapes == [(3, 8)]
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert calls == [True, False, False]  # once for both factors of each backward pass
    y = linear(x * 1.5)
    (truth,) = torch.autograd.grad((2 * y * (y + 3) + y - 1).sum(), x)
    torch.testing.assert_close(first, truth, rtol=1e-12, atol=1e-12)
    assert torch.equal(first, second)
    with torch.no_grad():
        run()
    assert len(calls) == 4


def test_every_activation_is_offloaded_once_and_reloaded_on_use():
    host = OffloadSavedTensors()
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(3, 7, dtype=torch.float64))
    with host.enabled():
        h = x.sin()
        y = (h * h).exp() @ weight.t()
    # sin saves x, the product h twice, exp its output, which the matrix product saves too.
    assert (host.offloaded, host.nbytes, host.reloaded) == (3, 3 * 5 * 7 * 8, 0)
    y.sum().backward()
    assert host.reloaded == 3  # each once, although h and the output of exp are saved twice
    gradient, x.grad = x.grad, None
    (x.sin() ** 2).exp().matmul(weight.t()).sum().backward()
    torch.testing.assert_close(gradient, x.grad, rtol=1e-12, atol=1e-12)


def test_host_memory_is_freed_with_the_graph_and_storage_used_again_is_another_tensor():
    host = OffloadSavedTensors()
    x = torch.randn(1000, requires_grad=True)
    with host.enabled():
        for _ in range(5):
            y = (x * 2).sin().sum()  # its input is freed at once; the next may reuse its memory
            del y
    assert host.offloaded == 5
    assert len(host._by_storage) == 0


def test_sharded_saved_tensors_are_restored_whole(worker_pool):
    for numel, part in worker_pool.run_mesh(ParallelLayout(tp=2, dp=1), _sharded_over_two):
        assert (numel, part) == (15, 8)


def _sharded_over_two(mesh: Mesh) -> tuple[int, int]:
    x = torch.arange(15.0, dtype=torch.float64).view(5, 3).requires_grad_()
    with count_saved_activations(nn.Module()) as kept, mesh.counting() as traffic:
        y = activation_checkpoint(
            lambda t: (t * t).sin().sum(), x, hooks=ShardSavedTensors(mesh.axis("tp"))
        )
        y.backward()
    assert traffic.of("tp", "all_gather of saved activations").calls == 1
    torch.testing.assert_close(x.grad, 2 * x.detach() * (x.detach() ** 2).cos())
    return x.numel(), kept.shapes[0][0]
