"""Backends against the reference in float64 on drawn shapes, values and gradients."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_kernels import (
    Mask,
    attention,
    cross_entropy,
    gelu,
    grouped_matmul,
    layer_norm,
    linear,
    rms_norm,
    rope,
    softmax,
    swiglu,
)
from megatron_kernels.case import Case
from megatron_kernels.check import check_backend
from megatron_kernels.inputs import InputGenerator
from megatron_kernels.registry import Op

CPU = torch.device("cpu")
ROWS, WIDTHS, HEADS = st.integers(0, 9), st.integers(1, 70), st.integers(1, 4)


@st.composite
def norms(draw: st.DrawFn) -> tuple[Any, ...]:
    rows, width = draw(ROWS), draw(st.integers(8, 70))  # few channels can have no deviation
    return ((rows, draw(ROWS), width), (width,))


def numbers(generator: InputGenerator, *shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(generator.normal(*shape) for shape in shapes)


def of_norm(shapes: Any, bias: bool, generator: InputGenerator) -> tuple[Any, ...]:
    x, gain = numbers(generator, *shapes)
    return (x, gain, *((generator.normal(*shapes[1]),) if bias else ()), 1e-5, False)


def of_attention(shape: Any, generator: InputGenerator) -> tuple[Any, ...]:
    s, b, groups, copies, d, mask = shape
    q, k, v = numbers(generator, (s, b, groups * copies, d), *((s, b, groups, d),) * 2)
    return (q, k, v, mask)


MASKS = st.sampled_from([Mask(), Mask(causal=False), Mask(window=2), Mask(prefix=3)])
CALLS: dict[str, tuple[Op[..., Any], st.SearchStrategy[Any], Callable[..., tuple[Any, ...]]]] = {
    "layer_norm": (layer_norm, norms(), lambda g, s: of_norm(s, True, g)),
    "rms_norm": (rms_norm, norms(), lambda g, s: of_norm(s, False, g)),
    "gelu": (gelu, st.tuples(ROWS, WIDTHS), lambda g, s: (g.normal(*s), "tanh")),
    "swiglu": (
        swiglu,
        st.tuples(ROWS, st.just(2), WIDTHS),
        lambda g, s: (g.normal(*s),),
    ),
    "softmax": (softmax, st.tuples(ROWS, WIDTHS), lambda g, s: (g.normal(*s), None, 0.3)),
    "rope": (
        rope,
        st.tuples(ROWS, st.integers(1, 3), HEADS, st.integers(1, 9)),
        lambda g, s: (g.normal(*s[:3], 2 * s[3]), *rope_tables_of(g, s[0], s[3]), False),
    ),
    "linear": (
        linear,
        st.tuples(ROWS, WIDTHS, WIDTHS),
        lambda g, s: (g.normal(s[0], s[1]), g.normal(s[2], s[1]), g.normal(s[2])),
    ),
    "cross_entropy": (
        cross_entropy,
        st.tuples(ROWS, WIDTHS),
        lambda g, s: (g.normal(*s), g.integers(s[1], s[0])),
    ),
    "attention": (
        attention,
        st.tuples(
            st.integers(1, 40),
            st.integers(1, 2),
            st.integers(1, 2),
            st.integers(1, 3),
            st.integers(1, 33),
            MASKS,
        ),
        lambda g, s: of_attention(s, g),
    ),
    "grouped_matmul": (
        grouped_matmul,
        st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=4), WIDTHS, WIDTHS),
        lambda g, s: (
            g.normal(sum(s[0]), s[1]),
            g.normal(len(s[0]), s[1], s[2]),
            torch.tensor(s[0]),
            False,
        ),
    ),
}


def rope_tables_of(
    generator: InputGenerator, rows: int, half: int
) -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.float64 if generator.dtype == torch.float64 else torch.float32
    angles = torch.arange(rows)[:, None, None] / torch.arange(1, half + 1, dtype=torch.float64)
    return angles.cos().to(table), angles.sin().to(table)


@pytest.mark.parametrize("name", CALLS)
def test_every_backend_equals_the_reference_on_drawn_shapes(name: str) -> None:
    op, shapes, make = CALLS[name]
    assert op.automatic[:-1], "only the reference"

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(shapes, st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    def compare(shape: Any, dtype: torch.dtype) -> None:
        case = Case(op, str(shape), lambda generator: arguments_of(op, make(generator, shape)))
        for backend in op.backends[:-1]:
            result = check_backend(case, backend, dtype, CPU)
            assert result.passed, result

    compare()


def arguments_of(op: Op[..., Any], given_arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments with the defaults of the operation."""
    bound = inspect.signature(op.signature).bind(*given_arguments)
    bound.apply_defaults()
    return tuple(value for key, value in bound.arguments.items() if key != "backend")
