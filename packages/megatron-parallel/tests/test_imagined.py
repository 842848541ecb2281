"""One rank of an imagined job: its mesh, its ledger and its memory, on an imagined CPU.

Where tensors of the device "meta" stand for those of a device, tensors of the CPU are those of the
host, which have values.
"""

import re
from collections.abc import Callable
from typing import Any

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
from megatron_parallel.collectives.extremes import to_ordered
from megatron_parallel.imagined import (
    NoGuardError,
    functions,
    guard_loaded,
    imagined_device,
    read_integers,
)
from megatron_parallel.imagined.cuda_kernels import cuda_kernels
from megatron_parallel.imagined.functions import Queue, cuda_functions, host_memory
from megatron_parallel.imagined.ledger import DeviceLedger
from megatron_parallel.imagined.reading import read_numbers
from megatron_parallel.imagined.sizes import needs_size
from megatron_parallel.imagined.storages import StorageLedger
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.profiler import profile

ATEN = torch.ops.aten
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


# -- the ledger, by hand --------------------------------------------------------------------------


@pytest.fixture
def ledger():
    with DeviceLedger("meta", StorageLedger(512)) as found:
        yield found


def on_device(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


A, N = 4, 4 * 10  # bytes of a number, of a tensor

OPERATIONS: dict[str, tuple[Callable[[Any, Any, Any], Any], str, int]] = {
    "read two, write one": (lambda a, b, c: a + b, "add", 3 * N),
    "read one twice": (lambda a, b, c: a * a, "mul", 2 * N),
    "in place": (lambda a, b, c: a.add_(b), "add_", 3 * N),
    "in place, of itself": (lambda a, b, c: a.add_(a), "add_", 2 * N),
    "into another": (lambda a, b, c: torch.add(a, b, out=c), "add", 3 * N),
    "copy": (lambda a, b, c: a.copy_(b), "copy_", 2 * N),
    "fill": (lambda a, b, c: a.fill_(1.0), "fill_", N),
    "zero": (lambda a, b, c: a.zero_(), "zero_", N),
    "several at once": (lambda a, b, c: torch._foreach_add_([a, b], 1.0), "_foreach_add_", 4 * N),
    "of a part": (lambda a, b, c: a[:5].neg(), "neg", N),
    "to another dtype": (lambda a, b, c: a.half(), "_to_copy", N + N // 2),
    "new values": (lambda a, b, c: torch.ones(10, device="meta"), "ones", N),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_bytes_are_those_that_a_kernel_reads_and_writes(name: str, ledger: DeviceLedger):
    act, kernel, nbytes = OPERATIONS[name]
    tensors = [on_device(10) for _ in range(3)]
    ledger.clear()
    queued = ledger.queue.queued
    act(*tensors)
    if name == "new values":
        assert sum(ledger.bytes_moved.values()) == nbytes
        return
    assert ledger.kernels == {kernel: 1} and sum(ledger.bytes_moved.values()) == nbytes
    assert ledger.queue.queued > queued and not (ledger.waits or ledger.copies or ledger.flops)


def test_views_allocations_and_host_operations_are_no_kernels(ledger: DeviceLedger):
    x = on_device(4, 6)
    x.view(24)[2:].unsqueeze(0).detach()
    x.new_empty(3), torch.empty_like(x), x.new_empty_strided((2,), (1,))
    host = torch.arange(6.0)
    assert float((host * 2).sum()) == 30.0  # the host computes values
    assert torch.ones(2, device="cpu").sum() == 2
    assert not (ledger.kernels or ledger.bytes_moved or ledger.waits)


def test_products_count_operations_instead_of_bytes(ledger: DeviceLedger):
    a, b = on_device(3, 5), on_device(5, 7)
    for _ in range(2):
        a @ b
    assert ledger.kernels == {"mm": 2} and ledger.flops == 2 * (2 * 3 * 5 * 7)
    assert not ledger.bytes_moved
    ledger.kernel("mine", (a, b))
    assert ledger.kernels["mine"] == 1 and ledger.bytes_moved.total() == (15 + 35) * 4
    ledger.clear()
    assert not (ledger.kernels or ledger.bytes_moved or ledger.flops)


def test_values_that_the_host_reads_are_waits_and_are_assumed(ledger: DeviceLedger):
    ledger.queue.add()
    assert ledger.queue.completed == 0
    number = on_device(1).item()
    assert number == 1.0 and isinstance(number, float)
    assert on_device(1, dtype=torch.int64).item() == 1
    assert on_device(1, dtype=torch.bool).item() is False
    assert ledger.waits.total() == 3 and all(w.startswith("item at ") for w in ledger.waits)
    assert ledger.queue.completed == ledger.queue.queued > 0
    numbers = on_device(5, dtype=torch.int64)
    assert torch.bincount(numbers, minlength=6).shape == (6,)
    assert ATEN.bincount(numbers, None, 7).shape == (7,)
    assert torch.bincount(numbers).shape == (0,)


def copies(ledger: DeviceLedger, act: Callable[[], object]) -> tuple[int, int, list[str]]:
    """Returns blocking and other copies from the host, and the causes of waits."""
    ledger.clear()
    act()
    waits = [cause.partition(" at ")[0] for cause in ledger.waits.elements()]
    return ledger.blocking_copies.total(), ledger.copies.total(), waits


def test_copies_from_the_host_block_it_unless_they_are_asynchronous(ledger: DeviceLedger):
    host, x = torch.ones(3), on_device(3)
    assert copies(ledger, lambda: host.to("meta")) == (1, 0, [])
    assert copies(ledger, lambda: host.to("meta", non_blocking=True)) == (0, 1, [])
    assert copies(ledger, lambda: x.copy_(host)) == (1, 0, [])
    assert copies(ledger, lambda: x.copy_(host, non_blocking=True)) == (0, 1, [])
    assert copies(ledger, lambda: ATEN.copy_(x, host, True)) == (0, 1, [])
    assert copies(ledger, lambda: x.copy_(on_device(3))) == (0, 0, [])
    assert copies(ledger, lambda: x.double()) == (0, 0, [])


@pytest.mark.parametrize("later", [False, True])
def test_copies_to_the_host_are_waits_unless_they_are_asynchronous(
    ledger: DeviceLedger, later: bool
):
    x = on_device(3)
    ledger.clear()
    with pytest.raises(NotImplementedError, match="meta"):  # which has no values to copy
        x.to("cpu", non_blocking=later)
    causes = [cause.partition(" at ")[0] for cause in ledger.waits]
    assert causes == ([] if later else ["copy to the host"])


def test_queries_and_pinned_memory_are_answered_by_the_ledger(ledger: DeviceLedger):
    host = torch.ones(3)
    assert not on_device(2).is_pinned() and host.pin_memory().tolist() == [1.0] * 3
    assert torch.empty(3, pin_memory=True).shape == (3,)
    assert ATEN.record_stream(on_device(2), torch.Stream("cpu")) is None
    assert not ledger.kernels


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "needed"),
    [
        (ATEN.index.Tensor, [on_device(4), [on_device(4, dtype=torch.bool)]], {}, True),
        (ATEN.index.Tensor, [on_device(4, 4), [None, on_device(4, dtype=torch.uint8)]], {}, True),
        (ATEN.index.Tensor, [on_device(4, 4), [None, on_device(4, dtype=torch.int64)]], {}, False),
        (ATEN.repeat_interleave.Tensor, [on_device(4)], {}, True),
        (ATEN.repeat_interleave.Tensor, [on_device(4)], {"output_size": 9}, False),
        (ATEN.nonzero.default, [on_device(4)], {}, True),
        (ATEN.add.Tensor, [on_device(4), on_device(4)], {}, False),
    ],
    ids=lambda value: str(value) if not isinstance(value, (list, dict)) else "",
)
def test_sizes_that_depend_on_values_are_needed(
    func: Any, args: list[Any], kwargs: dict[str, Any], needed: bool
):
    assert needs_size(func, args, kwargs) == needed


def test_storages_are_rounded_up_and_counted_once(ledger: DeviceLedger):
    storages = ledger.storages
    for numbers, nbytes in ((1, 512), (128, 512), (129, 1024)):
        x = on_device(numbers)
        assert storages.live == storages.peak == nbytes
        views = [x[:1], x.view(1, -1)]
        assert storages.live == nbytes
        del x, views
        assert storages.live == 0
        ledger.clear()
        assert storages.peak == 0
    assert StorageLedger()._granularity == 512


def test_parts_are_restored_after_their_block(ledger: DeviceLedger):
    kept = []
    with pytest.raises(KeyError), ledger.storages.part("outer"):
        with ledger.storages.part("inner"):
            kept.append(on_device(1))
        kept.append(on_device(200))
        raise KeyError
    kept.append(on_device(300))
    found = ledger.storages.by_part()
    assert found == {"inner": 512, "outer": 1024, "activations and temporaries": 1536}
    ledger.storages.relabel("moved", [kept[0], torch.ones(3)])  # the other is not on the device
    assert ledger.storages.by_part()["moved"] == 512 and "inner" not in ledger.storages.by_part()


def test_code_lines_are_those_of_the_packages_and_nodes_of_a_backward_pass():
    with imagined_device("cpu") as ledger:
        x = torch.ones(3, requires_grad=True)
        ledger.clear()
        to_ordered(x.detach(), "max")
        lines = {line.rpartition(":")[0]: line for line in ledger.bytes_moved}
        assert list(lines) == ["megatron_parallel/collectives/extremes.py"]
        assert all(re.fullmatch(r".*\.py:\d+ to_ordered", line) for line in lines.values())
        y = x.exp()
        ledger.clear()
        y.backward(torch.ones_like(y.detach()))
        assert any(line == "backward pass, ExpBackward0" for line in ledger.bytes_moved)
        ledger.clear()
        x.detach().exp()
        assert list(ledger.bytes_moved) == ["outside of the packages"]


def test_numbers_with_values_are_read_and_others_assumed_in_order():
    assert read_numbers(torch.tensor([[0.5, 2.0], [3.0, 1.0]]), list) == [0.5, 2.0, 3.0, 1.0]
    with imagined_device("cpu"):
        assert read_numbers(torch.ones(2), lambda: (0.25, 4.0)) == [0.25, 4.0]


def test_reading_numbers_without_values_is_a_wait(ledger: DeviceLedger):
    with pytest.raises(NotImplementedError, match="meta"):  # which has no values to copy
        read_numbers(on_device(2), lambda: (0.25, 4.0))
    assert [cause.partition(" at ")[0] for cause in ledger.waits] == ["copy to the host"]


def test_functions_of_torch_cuda_describe_one_device_with_one_stream():
    waits: list[str] = []
    with cuda_functions("a device", 7 << 30, waits.append, Queue()):
        cuda = torch.cuda
        assert (cuda.device_count(), cuda.current_device(), cuda.is_available()) == (1, 0, True)
        assert cuda.get_device_capability() == (9, 0) and cuda.get_device_name() == "a device"
        properties = cuda.get_device_properties(0)
        assert (properties.name, properties.major, properties.minor) == ("a device", 9, 0)
        assert not cuda.is_current_stream_capturing()
        assert cuda.get_rng_state().shape == (16,) and cuda.get_rng_state().dtype == torch.uint8
        stream, event = cuda.current_stream(), cuda.Event()
        assert stream.query() and event.query() and stream.record_event(event) is event
        assert isinstance(stream.record_event(), functions.Event)
        assert (stream.device.type, stream.device_index, stream.stream_id) == ("cuda", 0, 0)
        assert event.elapsed_time(event) == 0.0
        assert torch.ones(1).record_stream(stream) is None
        assert waits == []
        cuda.synchronize()
        assert waits == ["synchronize"]
        for refused in (cuda.CUDAGraph, cuda.graph, cuda.graph_pool_handle):
            with pytest.raises(LayoutError, match="captures no graphs: run without CUDA graphs"):
                refused()
    assert host_memory() > 2**20 and host_memory() % 4096 == 0


@pytest.mark.parametrize("compiles", [False, True])
def test_functions_on_the_host_are_those_of_torch(monkeypatch, compiles: bool):
    q, x = torch.rand(1, 2, 3, 4), torch.rand(3, 4)
    weight = torch.rand(4)
    calls = (
        lambda f: f.scaled_dot_product_attention(q, q, q, is_causal=True),
        lambda f: f.rms_norm(x, (4,), weight, 1e-3),
        lambda f: f.silu(x),
    )
    expected = [call(torch.nn.functional) for call in calls]
    counted = DeviceLedger("cuda", StorageLedger())
    with cuda_kernels(counted):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiles)
        found = [call(torch.nn.functional) for call in calls]
    torch.testing.assert_close(found, expected)
    assert not counted.kernels


def test_an_event_is_reached_after_work_that_another_wait_completed():
    waits: list[str] = []
    queue = Queue()
    with cuda_functions("a device", 1 << 30, waits.append, queue):
        event = torch.cuda.Event()
        for _ in range(3):
            queue.add()
        event.record()
        assert queue.queued == 3 and not event.query()
        queue.drain()
        event.synchronize()
        assert waits == [] and queue.completed == 3
