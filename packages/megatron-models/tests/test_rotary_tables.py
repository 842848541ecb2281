"""Tables of rotary angles: rules by length, precision, and what is stored."""

import pytest
import torch
from megatron_kernels import DynamicNtkScaling, LinearScaling
from megatron_models import Placement
from megatron_models.components.rotary.module import RotaryTable, RotaryTables
from megatron_models.components.rotary.spec import RotarySpec
from megatron_parallel import Mesh

F32, F64 = torch.float32, torch.float64
DOUBLE = Placement(Mesh.single(), dtype=F64)


def angles(positions: torch.Tensor, base: float) -> torch.Tensor:
    """Returns the angles of 6 channels."""
    return positions[..., None] * base ** (-2 * torch.arange(3, dtype=F64) / 6)


@pytest.mark.parametrize(("context", "length"), [(None, 16), (16, 16), (8, 8), (3, 4)])
def test_a_rule_by_length_scales_by_the_length_of_the_whole_sequence(
    context: int | None, length: int
) -> None:
    """The base is multiplied by (2 length / 4 - 1)^(6 / 4) beyond 4 tokens."""
    spec = RotarySpec(6, 100.0, scaling=DynamicNtkScaling(2.0, 4))
    base = 100.0 * (2 * length / 4 - 1) ** (6 / 4)
    table = RotaryTable(spec, 16, DOUBLE)
    given = torch.tensor([[3, 0], [1, 7]])
    for positions, own in (
        (None, torch.arange(2, 7)[:, None]),
        (given, given.t()),
    ):
        cos, sin = table(5, 2, positions, context)
        expected = angles(own, base)
        torch.testing.assert_close(cos, expected.cos(), rtol=0, atol=1e-12)
        torch.testing.assert_close(sin, expected.sin(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "table_dtype"), [(torch.bfloat16, F32), (F32, F32), (F64, F64)], ids=str
)
def test_tables_are_not_stored_and_in_float32_at_least(
    dtype: torch.dtype, table_dtype: torch.dtype
) -> None:
    specs = RotarySpec(6, 100.0), RotarySpec(6, 100.0, scaling=LinearScaling(2.0))
    tables = RotaryTables(specs, 16, Placement(Mesh.single(), dtype=dtype))
    assert not tables.state_dict() and not list(tables.parameters())
    for buffer in tables.buffers():
        buffer.zero_()
    tables.reset()
    found = tables(3, 4, None)
    for spec, factor in zip(specs, (1, 2), strict=True):
        cos, sin = found[spec]
        assert cos.dtype == sin.dtype == table_dtype and cos.shape == (3, 1, 3)
        expected = angles(torch.arange(4, 7)[:, None], 100.0) / factor
        torch.testing.assert_close(cos.double(), expected.cos(), rtol=0, atol=1e-7)
        torch.testing.assert_close(sin.double(), expected.sin(), rtol=0, atol=1e-7)


def test_tables_on_the_meta_device_stay_there() -> None:
    table = RotaryTable(
        RotarySpec(6, 100.0), 16, Placement(Mesh.single(), dtype=F32, device="meta")
    )
    table.reset()
    assert table.cos.is_meta and table.sin.is_meta
