"""Sizes of tiles in the tables of Triton kernels: what the compiler and the hardware allow."""

import pytest
import torch

pytest.importorskip("triton")
from megatron_kernels.triton_kernels import attention_launch, ssd_parts

SMALL = 99 << 10  # bytes of shared memory of GPUs for workstations
POWERS = {1 << power for power in range(11)}
ATTENTION = {
    (name, *key): tiling
    for name in ("FORWARD", "QUERY_GRADIENT", "KEY_GRADIENT")
    for key, tiling in getattr(attention_launch, name).items()
}


@pytest.mark.parametrize("key", ATTENTION, ids=str)
def test_tiles_of_attention_are_powers_of_two_of_which_products_consist(key):
    _, size, width = key
    tiling = ATTENTION[key]
    assert {tiling.rows, tiling.steps} <= POWERS and min(tiling.rows, tiling.steps) >= 16
    assert tiling.num_warps in (4, 8) and 1 <= tiling.num_stages <= 3
    assert (size, width) in {(bytes_of, d) for bytes_of in (2, 4) for d in (64, 128, 256)}
    small = tiling.smaller()
    assert small == (min(tiling.rows, 64), min(tiling.steps, 32), 4, 1)
    # A program holds a tile of its rows, and one of keys or of values for each stage.
    assert size * width * (small.rows + small.steps * small.num_stages) <= SMALL


def test_each_kernel_of_attention_has_tiles_for_every_dtype_and_width():
    assert len(ATTENTION) == 3 * 2 * 3


@pytest.mark.parametrize("key", ssd_parts.TILINGS, ids=str)
def test_tiles_of_scans_are_powers_of_two(key):
    size, tokens = key
    tiling = ssd_parts.TILINGS[key]
    assert size in (2, 4) and {tokens, tiling.width, *tiling.warps} <= POWERS
    assert set(tiling.warps) <= {4, 8} and all(1 <= stages <= 3 for stages in tiling.stages)
    assert tiling.width in (32, 64)


@pytest.mark.parametrize(
    ("dtype", "width", "key"),
    [
        (torch.bfloat16, 1, (2, 64)),
        (torch.float16, 64, (2, 64)),
        (torch.bfloat16, 65, (2, 128)),
        (torch.float32, 128, (4, 128)),
        (torch.float32, 129, (4, 256)),
        (torch.float64, 256, (4, 256)),
    ],
)
def test_tiles_are_chosen_by_dtype_and_by_the_wider_head(dtype, width, key, monkeypatch):
    x = torch.zeros(1, dtype=dtype)
    for large in (True, False):
        monkeypatch.setattr(attention_launch, "has_data_center_memory", lambda _, n=large: n)
        whole = attention_launch.FORWARD[key]
        found = attention_launch.tiling(attention_launch.FORWARD, x, width)
        assert found == (whole if large else whole.smaller())
