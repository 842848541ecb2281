"""What is asked of torch's autograd engine, process groups, compiler and operations."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_parallel import _compat
from megatron_parallel._compat.imagined import (
    device_type_of,
    fake_tensors,
    flops_of,
    has_no_values,
    values_exist,
)
from torch.autograd import Function
from torch.utils import _triton

ATEN = torch.ops.aten


class Asked(Function):
    """A product that records what the running backward pass needs and returns."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, answers: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.answers = answers
        return a * b

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        wanted = [_compat.gradient_wanted(ctx, index) for index in range(2)]
        returned = [_compat.gradient_returned(ctx, 0)] if wanted[0] else []
        ctx.answers.append((wanted, returned))
        return grads[0] * b, grads[0] * a if wanted[1] else None, None


def test_a_backward_pass_needs_the_gradients_that_it_returns_or_adds() -> None:
    answers: list[Any] = []
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    product = Asked.apply(a, b, answers)
    product.sum().backward(retain_graph=True)
    torch.autograd.grad(product.sum(), a, retain_graph=True)
    assert answers == [([True, True], [False]), ([True, False], [True])]
    inner = a * 2  # no leaf
    torch.autograd.grad(Asked.apply(inner, b, answers).sum(), b)
    assert answers[-1] == ([False, True], [])
    Asked.apply(a, b.detach(), answers).sum().backward()
    assert answers[-1] == ([True, False], [False])


def test_compiled_code_computes_all_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    context = SimpleNamespace(needs_input_grad=(True, False))
    assert _compat.gradient_wanted(context, 0) and not _compat.gradient_wanted(context, 1)
    assert _compat.gradient_returned(context, 0)


@pytest.mark.parametrize(
    ("package", "device", "reason"),
    [
        (False, False, "Triton is not installed"),
        (True, False, "Triton does not support this device"),
        (True, True, None),
    ],
)
def test_a_gpu_has_no_compiler_without_triton(
    monkeypatch: pytest.MonkeyPatch, package: bool, device: bool, reason: str | None
) -> None:
    monkeypatch.setattr(_triton, "has_triton_package", lambda: package)
    monkeypatch.setattr(_triton, "has_triton", lambda: device)
    assert _compat.why_not_compiled() == reason


def test_functions_are_marked_for_a_compiler_as_torch_marks_them() -> None:
    def width() -> int:
        return 3

    def outside() -> int:
        """Reads a clock."""
        return 4

    assert _compat.constant_to_compiler(width) is width and width() == 3
    assert vars(width) == {"_dynamo_marked_constant": True}
    assert _compat.outside_graphs(outside) is outside and outside() == 4
    assert vars(outside) == {
        "_torchdynamo_disable": True,
        "_torchdynamo_disable_msg": "Reads a clock.",
    }


def aborted(monkeypatch: pytest.MonkeyPatch, backends: list[str], nccl: bool) -> list[str]:
    """Returns the calls of an abort of groups with these backends."""
    calls: list[str] = []

    def backend(name: str) -> SimpleNamespace:
        return SimpleNamespace(
            _group_start=lambda: calls.append(f"start {name}"),
            _group_end=lambda: calls.append(f"end {name}"),
        )

    groups = [
        SimpleNamespace(
            kind=kind,
            abort=lambda number=number: calls.append(f"abort {number}"),
            _get_backend=lambda device, number=number: backend(f"{device.type} {number}"),
        )
        for number, kind in enumerate(backends)
    ]
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: f"cuda:{group.kind}")
    _compat.abort_groups(groups)  # type: ignore[arg-type]
    return calls


def test_nccl_groups_are_aborted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert aborted(monkeypatch, ["gloo", "nccl", "nccl"], True) == [
        "start cuda 1",
        *("abort 0", "abort 1", "abort 2"),
        "end cuda 1",
    ]
    for backends, nccl in ((["gloo", "gloo"], True), (["nccl", "nccl"], False)):
        assert aborted(monkeypatch, backends, nccl) == ["abort 0", "abort 1"]
    world = SimpleNamespace(kind="gloo", abort=lambda: ended.append("world"))
    ended: list[str] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    _compat.abort_groups([])
    assert ended == ["world"]


def test_a_collective_without_work_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda t, **_: None)
    with pytest.raises(RuntimeError, match="this rank is not in the group of the collective"):
        _compat.start_all_reduce(torch.ones(1), None)  # type: ignore[arg-type]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


FLASH = ATEN._scaled_dot_product_flash_attention
PRODUCTS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], torch.Tensor, int]] = {
    "matrices": (ATEN.mm, (meta(3, 5), meta(5, 7)), {}, meta(3, 7), 2 * 3 * 5 * 7),
    "into another tensor": (
        ATEN.mm,
        (meta(3, 5), meta(5, 7), torch.float32),
        {"out": meta(3, 7, dtype=torch.float32)},
        meta(3, 7),
        2 * 3 * 5 * 7,
    ),
    "rows of groups": (
        ATEN._grouped_mm,
        (meta(6, 5), meta(2, 5, 7)),
        {},
        meta(6, 7),
        2 * 6 * 5 * 7,
    ),
    "sums of groups": (
        ATEN._grouped_mm,
        (meta(5, 6), meta(6, 7)),
        {},
        meta(2, 5, 7),
        2 * 5 * 6 * 7,
    ),
    "several matrices": (
        ATEN._grouped_mm,
        (meta(3, 6, 5), meta(3, 5, 7)),
        {},
        meta(3, 6, 7),
        2 * 3 * 6 * 5 * 7,
    ),
    "attention with grouped heads": (
        FLASH,
        (meta(2, 8, 16, 4), meta(2, 2, 12, 4), meta(2, 2, 12, 4)),
        {},
        meta(2, 8, 16, 4),
        2 * (2 * 2 * 8 * 16 * 12 * 4),
    ),
    "no product": (ATEN.relu, (meta(3, 5),), {}, meta(3, 5), 0),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_operations_of_products_are_counted(name: str) -> None:
    packet, args, kwargs, out, expected = PRODUCTS[name]
    assert flops_of(packet, args, kwargs, out) == expected


def test_tensors_without_values_are_those_of_meta_and_fake_devices() -> None:
    assert has_no_values(meta(2)) and not has_no_values(torch.ones(2))
    assert (device_type_of(meta(2)), device_type_of(torch.ones(2))) == ("meta", "cpu")
    with fake_tensors(device_exists=False):
        assert has_no_values(torch.ones(2)) and device_type_of(torch.ones(2)) == "cpu"
        with values_exist():
            assert torch.ones(2).tolist() == [1.0, 1.0]
    assert torch.ones(2).tolist() == [1.0, 1.0]
    whole = torch.arange(6)
    assert _compat.storage_identity(whole) == _compat.storage_identity(whole[2:])
    assert _compat.storage_identity(whole) != _compat.storage_identity(whole.clone())
