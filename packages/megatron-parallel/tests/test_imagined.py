"""One rank of an imagined job: its mesh, its ledger and its memory, on an imagined CPU."""

import pytest
import torch
import torch.distributed as dist
from megatron_parallel import (
    ColumnParallelLinear,
    LayoutError,
    Mesh,
    ParallelLayout,
    all_gather,
    all_reduce,
    initialize_parameters,
    reduce_scatter,
)
from megatron_parallel.imagined import (
    NoGuardError,
    guard_loaded,
    imagined_device,
    read_integers,
)
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.profiler import profile

LAYOUT = ParallelLayout(tp=4, pp=2, dp=128)


def test_a_rank_of_1024_has_the_groups_of_its_layout():
    with Mesh.imagined(LAYOUT, 700) as mesh:
        assert (mesh.rank, mesh.world_size, mesh.is_imagined) == (700, 1024, True)
        for name in ("tp", "dp", "pp", "tp_dp_cp", "embedding"):
            axis = mesh.axis(name)
            assert axis.ranks == LAYOUT.group_of(name, 700)
            assert axis.process_group.size() == axis.size
        mesh.agree("layouts", {"layout": "anything"})  # there is no other rank
    assert not dist.is_initialized()


def test_collectives_of_an_imagined_job_have_shapes_and_are_counted():
    with Mesh.imagined(LAYOUT, 5) as mesh, imagined_device("cpu"), mesh.counting() as traffic:
        tp = mesh.axis("tp")
        x = torch.ones(8, 3)
        assert all_gather(x, tp).shape == (32, 3)
        assert reduce_scatter(x, tp).shape == (2, 3)
        assert all_reduce(x, mesh.axis("dp")).shape == (8, 3)
    assert traffic.of("tp", "all_gather").nbytes == 96
    assert traffic.of("dp", "all_reduce").calls == 1


def test_one_rank_is_imagined_at_a_time():
    with (
        Mesh.imagined(LAYOUT, 0),
        pytest.raises(LayoutError, match=r"in a job of torch\.distributed already"),
    ):
        Mesh.imagined(LAYOUT, 1)
    with Mesh.imagined(LAYOUT, 1) as mesh:
        assert mesh.axis("tp").index == 1


def test_a_rank_outside_of_the_layout_is_refused():
    with pytest.raises(LayoutError, match="rank 1024 is outside a world of 1024 ranks"):
        Mesh.imagined(LAYOUT, 1024)


def test_a_mesh_of_one_rank_needs_no_job():
    with Mesh.imagined(ParallelLayout(dp=1)) as mesh:
        assert mesh.world_size == 1 and not dist.is_initialized()


@pytest.mark.skipif("torch.cuda.is_available()")
def test_a_cuda_device_needs_the_guard():
    if guard_loaded():
        pytest.skip("this process has the guard")
    with pytest.raises(NoGuardError, match="no device guard is loaded"), imagined_device("cuda"):
        pass


def test_kernels_bytes_and_operations_of_a_linear_layer_by_hand():
    with imagined_device("cpu") as ledger:
        w = torch.empty(32, 16, requires_grad=True)
        x = torch.empty(4, 16)
        ledger.clear()
        y = torch.relu(x @ w.t())
        assert ledger.kernels == {"mm": 1, "relu": 1}
        assert ledger.flops == 2 * 4 * 16 * 32
        assert sum(ledger.bytes_moved.values()) == 2 * 4 * 32 * 4  # relu reads and writes [4, 32]
        ledger.clear()
        y.backward(torch.empty_like(y))
        assert ledger.flops == 2 * 4 * 16 * 32  # x needs no gradient
        assert ledger.kernels["threshold_backward"] == ledger.kernels["mm"] == 1
        assert not ledger.waits


def test_every_read_of_a_value_is_a_wait():
    with imagined_device("cpu") as ledger:
        x = torch.arange(6)
        assert read_integers(x, lambda: [7] * 6) == [7] * 6
        assert not ledger.waits  # a copy from the host to the host
        float(x.sum())
        bool((x == 2).any())
        torch.bincount(x, minlength=6)
    assert sum(ledger.waits.values()) == 3


def test_an_index_of_integers_is_not_a_wait_and_a_mask_is():
    with imagined_device("cpu") as ledger:
        x, rows = torch.empty(8, 2), torch.arange(4)
        assert x[rows, 0].shape == (4,)
        assert rows.repeat_interleave(rows, output_size=9).shape == (9,)
        assert not ledger.waits
        with pytest.raises(DynamicOutputShapeException):
            x[x[:, 0] > 0]
    assert sum(ledger.waits.values()) == 1


def test_assumed_values_have_to_fit():
    with imagined_device("cpu"), pytest.raises(ValueError, match="2 values are assumed for 6"):
        read_integers(torch.arange(6), lambda: [1, 2])
    assert read_integers(torch.arange(3), lambda: [0]) == [0, 1, 2]  # values exist


def test_memory_by_part_and_line_at_the_peak():
    with imagined_device("cpu") as ledger:
        storages = ledger.storages
        with storages.part("parameters"):
            kept = torch.empty(100)
        moved = torch.empty(10)
        storages.relabel("state", [moved])
        ledger.clear()
        temporary = torch.empty(1000)
        view = temporary[10:]
        del temporary
        assert storages.live == 4 * 1110
        del view
        last = torch.empty(50)
        assert storages.live == 4 * 160
        assert storages.peak == 4 * 1110
        assert storages.by_part() == {
            "parameters": 400,
            "state": 40,
            "activations and temporaries": 200,
        }
        at_peak = storages.at_peak()
        parts = {part: size for (part, _), size in at_peak.items()}
        assert parts == {"parameters": 400, "state": 40, "activations and temporaries": 4000}
        del kept, last


def test_a_module_of_an_imagined_job_has_no_values_and_is_not_initialized():
    with Mesh.imagined(LAYOUT, 3) as mesh, imagined_device("cpu") as ledger:
        layer = ColumnParallelLinear(64, 256, mesh)
        ledger.clear()
        initialize_parameters(layer, seed=1, mesh=mesh)
        assert not ledger.kernels
        assert layer.weight.shape == (64, 64)


def test_the_peak_is_that_of_torchs_profiler_in_a_real_run():
    def train(weights):
        x = torch.ones(64, 256)
        for weight in weights:
            x = torch.nn.functional.gelu(x @ weight)
        x.square().mean().backward()

    def built():
        return [torch.full((256, 256), 0.01, requires_grad=True) for _ in range(3)]

    weights = built()
    with profile(profile_memory=True) as profiler:
        train(weights)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    with imagined_device("cpu") as ledger:
        weights = built()
        ledger.clear()
        before = ledger.storages.live
        train(weights)
        imagined = ledger.storages.peak - before
    assert imagined == pytest.approx(peak, rel=0.03)
