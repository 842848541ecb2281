"""The choice of a backend, with an operation for this test."""

import inspect
from dataclasses import replace

import pytest
import torch
from megatron_kernels import (
    Backend,
    KernelError,
    attention,
    explain_on,
    find_operation,
    fuses_on,
    gelu,
    layer_norm,
    op,
    operations,
    quantized_matmul,
)
from megatron_kernels._compat import is_fake, is_plain
from megatron_kernels.cases import CASES
from megatron_kernels.ops.attention.mask import Mask
from megatron_kernels.registry import NEVER_RUN, accept_all
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


def even_only(x: int) -> str | None:
    return None if x % 2 == 0 else f"{x} is odd"


def positive_only(x: int) -> str | None:
    return None if x > 0 else f"{x} is not positive"


@op(
    Backend("halve", lambda x: ("halve", x // 2), even_only, "exact halves"),
    Backend("floor", lambda x: ("floor", x // 2), positive_only, "rounded down"),
)
def half(x: int, *, backend: str = "auto") -> tuple[str, int]:
    """Returns half of a number."""
    return half.run(backend, x)


def test_the_first_supported_backend_runs() -> None:
    assert half(6) == ("halve", 3)
    assert half(7) == ("floor", 3)


def test_a_named_backend_runs_even_if_another_is_preferred() -> None:
    assert half(6, backend="floor") == ("floor", 3)


def test_an_unsupported_named_backend_is_an_error_with_its_reason() -> None:
    with pytest.raises(KernelError, match="half cannot use backend halve: 7 is odd"):
        half(7, backend="halve")


def test_the_first_of_several_named_backends_that_supports_a_call_runs() -> None:
    assert half(6, backend="floor,halve") == ("floor", 3)
    assert half(-6, backend="floor,halve") == ("halve", -3)
    with pytest.raises(KernelError, match="half has no backend 'flor'; did you mean 'floor'"):
        half(6, backend="halve,flor")
    with pytest.raises(KernelError, match="half cannot use backend floor: -3 is not positive; hal"):
        half(-3, backend="floor,halve")


def test_an_unknown_backend_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(KernelError, match="half has no backend 'flor'; did you mean 'floor'"):
        half(7, backend="flor")
    with pytest.raises(KernelError, match="it has halve, floor"):
        half(7, backend="zzz")
    with pytest.raises(KernelError, match="no backend 'zzz'"):
        half.explain(7, backend="zzz")


def test_an_error_of_all_backends_names_every_reason() -> None:
    with pytest.raises(KernelError, match="halve: -3 is odd; floor: -3 is not positive"):
        half(-3)


@pytest.mark.parametrize(
    ("x", "request_", "backend", "reason"),
    [
        (6, "auto", "halve", "first choice"),
        (7, "auto", "floor", "halve: 7 is odd"),
        (6, "floor", "floor", "requested"),
        (-3, "auto", None, "halve: -3 is odd; floor: -3 is not positive"),
        (7, "halve", None, "halve: 7 is odd"),
        (7, "halve,floor", "floor", "halve: 7 is odd"),
        (6, "floor,halve", "floor", "requested"),
        (-3, "floor,halve", None, "floor: -3 is not positive; halve: -3 is odd"),
    ],
)
def test_explain_predicts_the_choice(
    x: int, request_: str, backend: str | None, reason: str
) -> None:
    choice = half.explain(x, backend=request_)
    assert (choice.backend, choice.reason) == (backend, reason)
    if backend is not None:
        assert half(x, backend=request_)[0] == backend


@op(
    Backend("untried", lambda x: ("untried", x // 2), even_only, "a kernel", on_request=NEVER_RUN),
    Backend("floor", lambda x: ("floor", x // 2), positive_only, "rounded down"),
)
def carefully(x: int, *, backend: str = "auto") -> tuple[str, int]:
    """Returns half of a number."""
    return carefully.run(backend, x)


def test_a_backend_on_request_runs_only_if_a_call_names_it() -> None:
    assert carefully(6) == ("floor", 3)
    assert carefully(6, backend="untried") == ("untried", 3)
    choice = carefully.explain(6)
    assert choice.backend == "floor"
    assert choice.reason == f"untried: on request only, {NEVER_RUN}"
    assert "untried         can run  [a kernel; on request only, never run on a GPU" in str(choice)
    assert carefully.explain(6, backend="untried").reason == "requested"
    assert carefully.explain(7).reason == "untried: 7 is odd"  # the reason that no request removes
    with pytest.raises(KernelError, match="untried: on request only, never run on a GPU"):
        carefully(-4)


def test_compiled_code_uses_a_kernel_of_ours_only_if_a_call_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @op(
        Backend("kernel", lambda x: ("kernel", x), accept_all, "", fuses=True),
        Backend("plain", lambda x: ("plain", x), accept_all, ""),
    )
    def named(x: int, *, backend: str = "auto") -> tuple[str, int]:
        return named.run(backend, x)

    assert named(1) == ("kernel", 1) and named.explain(1).backend == "kernel"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert named(1) == ("plain", 1) and named.explain(1).backend == "plain"
    assert named(1, backend="kernel") == ("kernel", 1)


def test_a_device_fuses_if_the_first_backend_is_one_kernel_there() -> None:
    kernel = Backend("kernel", lambda x: x, accept_all, "", fuses=True)
    untried = replace(kernel, on_request=NEVER_RUN)
    plain = Backend("plain", lambda x: x, accept_all, "")
    device = torch.device("cuda")
    with FakeTensorMode():
        for backends, expected in (
            ((kernel, plain), True),
            ((plain, kernel), False),
            ((untried, plain), False),
            ((untried, kernel), True),
        ):

            @op(*backends)
            def same(x: int, *, backend: str = "auto") -> int:
                return same.run(backend, x)

            assert fuses_on(same, device, torch.bfloat16) is expected
            assert not fuses_on(same, device, torch.int8)
            assert not fuses_on(same, "cpu", torch.bfloat16)


def test_a_small_call_explains_the_backend_of_an_operation() -> None:
    plain = explain_on(layer_norm)
    assert (plain.op, plain.requested, plain.backend) == ("layer_norm", "auto", "torch")
    assert explain_on(gelu, "reference").backend == "reference"
    with pytest.raises(KernelError, match="gelu has no backend 'refrence'; did you mean 'refer"):
        explain_on(gelu, "refrence")
    (reason,) = (
        status.unsupported_reason
        for status in explain_on(attention, "torch,flash_attn", dtype=torch.float64).statuses
        if status.backend == "flash_attn"
    )
    assert reason == "needs a CUDA tensor, q is on cpu"


def test_the_first_small_call_that_has_a_backend_is_explained() -> None:
    none = explain_on(attention, "flash_attn")  # no call has it on a CPU: that of the first one
    assert none.backend is None and none.requested == "flash_attn"
    some = explain_on(quantized_matmul, "int_mm")  # the first call is in FP8
    assert some.backend == "int_mm" and some.reason == "requested"


def test_an_operation_is_found_by_name() -> None:
    assert find_operation("gelu") is gelu and operations()["rope_qkv"].name == "rope_qkv"
    with pytest.raises(KernelError, match=r"'gellu'; did you mean gelu\? \(known: layer_norm, rms"):
        find_operation("gellu")


def test_tensors_are_plain_without_subclasses_and_modes() -> None:
    class Special(Tensor):
        pass

    x = torch.ones(2)
    for given, plain in (
        ((x, None, 3.0, torch.nn.Parameter(x)), True),
        ((), True),
        ((x, x.as_subclass(Special)), False),
    ):
        assert is_plain(given) is plain
    with FakeTensorMode():
        assert not is_plain((x,))
        assert is_fake(torch.ones(2)) and not is_fake(x)


def test_backends_that_never_ran_on_their_hardware_are_labelled() -> None:
    found = {(c.op.name, b.name): b.on_request for c in CASES for b in c.op.backends}
    ours = {("ssd_scan", "triton"), ("causal_conv", "triton"), ("quantize_tensor", "triton")}
    labelled = {each for each, label in found.items() if label == NEVER_RUN}
    assert ours < labelled  # other Triton kernels have run
    untried = {"flash_attn", "flash_attn_3", "transformer_engine", "apex", "scaled_grouped_mm"}
    assert untried == {name for _, name in labelled - ours}
    assert untried.isdisjoint(name for (_, name), label in found.items() if label != NEVER_RUN)


def test_a_choice_prints_one_line_per_backend_and_marks_the_chosen_one() -> None:
    lines = str(half.explain(x=7)).splitlines()
    assert lines[0] == "half: floor (request: auto)"
    assert "halve" in lines[1] and "cannot: 7 is odd" in lines[1]
    assert lines[2].lstrip().startswith("> floor") and "rounded down" in lines[2]


def test_an_operation_looks_like_its_function_and_cannot_be_changed() -> None:
    assert half.name == half.__name__ == "half"
    assert half.__doc__ == "Returns half of a number."
    assert repr(half).count("name='halve'") == 1  # each backend once
    assert list(inspect.signature(half).parameters) == ["x", "backend"]
    with pytest.raises(AttributeError):
        half.backends = ()  # type: ignore[misc]


def test_missing_libraries_are_reasons_and_not_import_errors() -> None:
    q = torch.zeros(2, 1, 1, 8)
    statuses = {
        v.backend: v.unsupported_reason for v in attention.explain(q, q, q, Mask()).statuses
    }
    assert statuses["flash_attn"] == "needs a CUDA tensor, q is on cpu"
    with pytest.raises(
        KernelError, match="layer_norm cannot use backend apex: needs a CUDA tensor"
    ):
        layer_norm(torch.zeros(3, 4), torch.ones(4), torch.zeros(4), backend="apex")


def test_dtypes_that_torch_does_not_support_use_the_reference() -> None:
    x, ones = torch.randn(3, 4, dtype=torch.bfloat16), torch.ones(4)
    assert layer_norm.explain(x, ones, ones).backend == "reference"
    assert layer_norm(x, ones, ones).dtype == torch.bfloat16


def test_annotations_are_enforced_for_every_backend() -> None:
    wrong: tuple[Tensor, Tensor] = (torch.ones(5), torch.ones(4))
    for backend in ("auto", "reference"):
        with pytest.raises(Exception, match="layer_norm"):
            layer_norm(torch.randn(3, 4), *wrong, backend=backend)
