"""The numbers of the benchmark: counted products, medians, rates, and the table."""

import time
from collections.abc import Callable
from typing import Any

import megatron_kernels.bench as benchmark
import pytest
import torch
from megatron_kernels import Backend, cli, op
from megatron_kernels.bench import Measurement, Rates, bench, measure, workloads_of
from megatron_kernels.cli import main
from megatron_kernels.inputs import InputGenerator
from megatron_kernels.registry import accept_all
from megatron_kernels.workload import SHAPES, Shape, Workload, least_bytes
from megatron_kernels.workloads import WORKLOADS
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

CPU = torch.device("cpu")
TINY = Shape(128, 256, 512)
DRAW = InputGenerator(torch.float32, CPU)
WITH_PRODUCTS = [each for each in WORKLOADS if each.products(TINY)]


def counted(workload: Workload) -> tuple[int, int]:
    """Returns the operations of a reference's products in both passes, as torch counts them."""
    arguments = workload.arguments(DRAW, TINY)
    with FlopCounterMode(display=False) as forward:
        found = workload.op.backends[-1].run(*workload.op.given(*arguments))
    leaves = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
    outputs = [y for y in (found if isinstance(found, tuple) else (found,)) if y.requires_grad]
    with FlopCounterMode(display=False) as backward:
        if outputs:
            torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs])
    return forward.get_total_flops(), backward.get_total_flops()


def needed(workload: Workload) -> float:
    """Returns the share of the reference's products that are needed."""
    if "grouped_" in workload.op.name:
        return 1 / 8  # the reference multiplies all rows by all 8 experts
    if "8 documents" in workload.label:
        return (TINY.tokens / 8 + 1) / TINY.tokens / 2  # it multiplies pairs that are masked
    causal = "causal" in workload.label or "soft-cap" in workload.label
    return (TINY.tokens + 1) / TINY.tokens / 2 if causal else 1.0


@pytest.mark.parametrize("workload", WITH_PRODUCTS, ids=lambda each: each.title)
def test_the_products_of_a_call_are_those_that_its_reference_makes(workload: Workload) -> None:
    forward, backward = counted(workload)
    # Half of the pairs are meant by "causal": the diagonal is a few per cent of these.
    assert 1.0 <= needed(workload) * forward / workload.products(TINY) < 1.07
    if backward:
        recomputed = 0.5 if workload.op.name == "attention" else 0.0  # scores, of two products
        assert workload.backward == backward / forward + recomputed


def test_operations_of_matrix_products_are_measured_as_such() -> None:
    products = {"linear", "grouped_matmul", "attention", "paged_attention", "quantized_matmul"}
    products |= {"quantized_grouped_matmul", "quantized_grouped_gradient"}
    assert {each.op.name for each in WITH_PRODUCTS} == products
    titles = [each.title for each in WORKLOADS]
    assert len({*titles}) == len(titles)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_sizes_divide_into_heads_documents_and_tiles_of_products(shape: Shape) -> None:
    assert shape.heads * 64 == shape.width
    assert all(x & (x - 1) == 0 for x in (shape.tokens, shape.width, shape.vocabulary))


def test_each_size_is_larger_than_the_one_before() -> None:
    for one, other in (("small", "medium"), ("medium", "large")):
        assert SHAPES[one].tokens < SHAPES[other].tokens  # type: ignore[index]
        assert SHAPES[one].width < SHAPES[other].width  # type: ignore[index]
        assert SHAPES[one].vocabulary < SHAPES[other].vocabulary  # type: ignore[index]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each.title)
def test_a_call_has_what_its_title_says(workload: Workload) -> None:
    names = workload.op.signature.__annotations__
    found = dict(zip(names, workload.arguments(DRAW, TINY), strict=False))
    if "16 sequences" in workload.label:
        x = found["q"] if "q" in found else found["x"]
        assert x.shape[:2] == (1, 16)  # one token of each
        assert not any(isinstance(v, Tensor) and v.requires_grad for v in found.values())
    if workload.title == "attention, decode, 16 sequences":
        assert found["query_offset"] + 1 == len(found["k"]) == TINY.tokens  # attends to all
    if workload.title == "paged_attention, decode, 16 sequences":
        assert found["pages"].lengths.tolist() == [TINY.tokens] * 16
    if "8 documents" in workload.label:
        assert found["mask"].document_ids.unique(return_counts=True)[1].tolist() == [16] * 8
    if workload.op.name == "attention" and "decode" not in workload.label:
        assert found["mask"].causal is ("full" not in workload.label)
        assert (found["dropout"] is not None) == ("dropout" in workload.label)
        heads, groups = found["q"].shape[2], found["k"].shape[2]
        assert groups * (4 if "grouped" in workload.label else 1) == heads == TINY.heads
        assert bool(found["scores"].softcap) == (workload.label == "soft-cap")
    if workload.op.name == "rope_qkv":
        assert found["fused"].shape[2:4] == (TINY.heads // 2, 2 + 2)
    if workload.op.name == "bias_dropout_add":
        dropped = (found["site"].least + 2**31) / 2**32  # the share of hashes below the least
        assert dropped == 1 / 8 and found["site"].scale == 1 / (1 - dropped)
    if "own scale" in workload.label or "given scale" in workload.label:
        assert (found["scale"] is None) == found["measures"] == ("own" in workload.label)
        assert found["rows"] is found["columns"] is True  # cast for both products


@op(Backend("plain", lambda x: 2 * x, accept_all, ""))
def twice(x: Tensor, *, backend: str = "auto") -> Tensor:
    """Doubles a tensor."""
    return twice.run(backend, x)


TWICE = Workload(twice, "", lambda draw, _: (draw.normal(8, 4),), lambda _: 1000.0)


def clock(seconds: list[float], runs: int) -> Callable[[], float]:
    """Returns a clock for which each run of a round takes the seconds of the round."""
    calls, now = 0, 0.0

    def read() -> float:
        nonlocal calls, now
        if calls % 2:
            now += seconds[calls // 2 // runs]
        calls += 1
        return now

    return read


@pytest.mark.parametrize(("threads", "name"), [(1, "process_time"), (2, "perf_counter")])
def test_times_are_medians_and_rates_those_of_the_best_round(
    threads: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:  # copy, product, forward and both; the first round only warms up
        monkeypatch.setattr(time, name, clock([64.0, 4.0, 1.0, 2.0], runs=4))
        rates, (plain,) = measure(TWICE, CPU, torch.float32, "small", rounds=3)
    finally:
        torch.set_num_threads(before)
    assert (plain.forward, plain.both) == (2.0, 2.0)
    assert rates == Rates(2 * 2**26, 2 * 1024**3)  # 64 MiB read and written; 1024 x 1024 matrices
    assert plain.products == 3 * 1000.0  # two products of the backward pass for one of the forward
    assert plain.bound == max(3000 / rates.flops, plain.moved / rates.bytes)


def test_a_clock_that_stands_still_divides_by_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        monkeypatch.setattr(time, "process_time", lambda: 5.0)
        rates, (plain,) = measure(TWICE, CPU, torch.float32, "small", rounds=1)
    finally:
        torch.set_num_threads(before)
    assert rates.bytes > 0 and 0 < plain.forward < 1e-6 and plain.share > 0


def test_a_call_without_gradients_has_times_and_bytes_of_one_pass() -> None:
    detached = Workload(twice, "", lambda draw, _: (draw.normal(8, 4).detach(),), lambda _: 10.0)
    _, (plain,) = measure(detached, CPU, torch.float32, "small", rounds=1)
    assert plain.both == 0.0 and plain.forward > 0
    assert (plain.products, plain.moved) == (10.0, 2 * 8 * 4 * 4)
    assert plain.share == plain.bound / plain.forward


def test_the_bound_is_named_by_what_takes_longer() -> None:
    few = Workload(twice, "", TWICE.arguments)
    many = Workload(twice, "", TWICE.arguments, lambda _: 1e15)
    for workload, products in ((few, False), (many, True)):
        rates, (plain,) = measure(workload, CPU, torch.float32, "small", rounds=1)
        assert plain.by_products is products
        assert plain.rate == (plain.products if products else plain.moved) / plain.both
        limit = plain.products / rates.flops if products else plain.moved / rates.bytes
        assert plain.bound == limit


def test_bytes_of_quantized_operands_are_those_of_elements_and_scales() -> None:
    (workload,) = (each for each in WORKLOADS if each.title == "quantized_matmul, int8")
    arguments = workload.arguments(DRAW, TINY)
    rows = TINY.tokens + 4 * TINY.width  # a byte for each element, a float32 scale for each row
    read, both = least_bytes(arguments, (torch.zeros(3),))
    assert (read, both) == (rows * TINY.width + 4 * rows + 12, 2 * read)


def test_calls_can_be_chosen_by_operation_and_by_backend() -> None:
    assert workloads_of(()) == WORKLOADS
    assert {each.op.name for each in workloads_of(["gelu", "rope"])} == {"gelu", "rope"}
    flash = workloads_of((), ["flash_attn"])
    assert {each.op.name for each in flash} == {"attention"}
    assert workloads_of(["gelu"], ["flash_attn"]) == ()
    reports = bench(CPU, torch.float32, "small", ["gelu"], rounds=1, backends=["reference"])
    ((_, (only,)),) = list(reports)
    assert only.backend == "reference"


REPORT = (
    Rates(bytes=20.5e9, flops=1234.5e9),
    (
        Measurement("op, small", "quick", None, None, 1e-3, 4e-3, 2e9, 1e6, 1e-3, True),
        Measurement("op, small", "half", None, "a label", 2e-3, 0.0, 2e9, 3e6, 1e-3, False),
        Measurement("op, small", "absent", "needs a moon", None),
    ),
)


def test_the_table_has_aligned_columns_of_milliseconds_rates_and_shares(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    passed: list[Any] = []

    def reports(*arguments: Any) -> Any:
        passed.extend(arguments)
        yield REPORT

    monkeypatch.setattr(benchmark, "bench", reports)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert main(["bench", "gelu", "--dtype", "bfloat16", "--backends", "torch"]) == 0
    title, columns, call, *rows = capsys.readouterr().out.splitlines()
    assert passed == [CPU, torch.bfloat16, "medium", ["gelu"], 7, ["torch"]]
    assert title == "bfloat16, medium, on cpu, 1 thread, CPU time: medians of 7 rounds, ms"
    assert call == "op, small  [copy 20.5 GB/s, product 1,234.5 GFLOP/s]"
    assert rows[0].split() == ["quick", "1.000", "4.000", "500", "GFLOP/s", "25%"]
    assert rows[1].split()[:5] == ["half", "2.000", "1.5", "GB/s", "50%"]
    assert rows[1].endswith("  on request only, a label")
    assert rows[2].split() == ["absent", "cannot:", "needs", "a", "moon"]
    assert columns.split() == ["backend", "forward", "both", "rate", "of", "bound"]
    for row in rows[:2]:  # numbers end below the names of their columns
        assert row[columns.index("forward") :][:7].strip() == row.split()[1]
        assert row[: columns.index("rate") + 4].endswith("/s")
        assert row[: len(columns)].endswith("%")
    assert rows[0][: columns.index("both") + 4].endswith(" 4.000")
    assert {row.index(row.split()[0]) for row in (columns, *rows)} == {2}


def test_the_title_names_the_threads_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "bench", lambda *_: iter([REPORT]))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert main(["bench", "gelu", "--rounds", "1", "--size", "large"]) == 0
    title = capsys.readouterr().out.splitlines()[0]
    assert title == "float32, large, on cpu, 3 threads: medians of 1 rounds, ms"


def test_a_gpu_is_measured_by_its_events_while_it_is_kept_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append(self)

        def synchronize(self) -> None:
            calls.append(("waits for", self))

        def elapsed_time(self, other: Any) -> float:
            calls.append((self, other))
            return 12.5  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append(cycles))
    clock = benchmark._Clock(torch.device("cuda"))
    assert clock.seconds(lambda: calls.append("runs")) == 0.0125
    first, last = (each for each in calls if isinstance(each, Event))
    # 5 ms at 2 GHz, in which the host starts all kernels.
    assert calls == [10_000_000, first, "runs", last, ("waits for", last), (first, last)]


def test_the_title_names_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "bench", lambda *_: iter([REPORT]))
    monkeypatch.setattr(cli, "_device", torch.device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert main(["bench", "gelu", "--device", "cuda:1", "--rounds", "2"]) == 0
    title = capsys.readouterr().out.splitlines()[0]
    assert title == "float32, medium, on GPU 1: medians of 2 rounds, ms"


def test_a_gpu_copies_a_gibibyte_and_multiplies_matrices_of_8192(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, made, one = torch.device("cuda"), [], torch.eye(1)

    def noted(*shape: int, **options: Any) -> Tensor:
        made.append((*shape, options["dtype"], options["device"]))
        return one

    monkeypatch.setattr(torch, "zeros", noted)
    monkeypatch.setattr(torch, "ones", noted)
    assert torch.equal(benchmark._copy(gpu)(), one)  # type: ignore[arg-type]
    assert torch.equal(benchmark._product(gpu, torch.bfloat16)(), one)  # type: ignore[arg-type]
    matrix = 8192, 8192, torch.bfloat16, gpu
    assert made == [(1024**3, torch.uint8, gpu), matrix, matrix]
