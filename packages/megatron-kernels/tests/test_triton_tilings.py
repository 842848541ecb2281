"""Sizes of tiles and of launches of Triton kernels: what the compiler and the hardware allow."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from megatron_kernels.triton_kernels import attention_launch, launch, ssd_parts

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


@pytest.mark.parametrize(
    ("capability", "large"),
    [
        *((each, True) for each in ((8, 0), (9, 0), (10, 0), (10, 3))),
        *((each, False) for each in ((7, 5), (8, 6), (8, 9), (12, 0), (12, 1))),
    ],
)
def test_gpus_of_data_centers_have_more_shared_memory(capability, large, monkeypatch):
    """As the table of technical specifications in NVIDIA's CUDA C++ programming guide."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert launch.has_data_center_memory(torch.device("cuda")) is large
    assert launch.has_data_center_memory(torch.device("cpu"))


def test_blocks_are_powers_of_two_with_4_to_16_warps():
    assert [launch.power_of_two(n) for n in (0, 1, 2, 3, 4, 5, 1025)] == [1, 1, 2, 4, 4, 8, 2048]
    blocks = [1 << power for power in range(17)]
    found = [launch.warps(block) for block in blocks]
    assert found == sorted(found) and {*found} == {4, 8, 16}
    # A thread has at most 64 elements up to the longest row that fits into registers.
    assert all(block <= 64 * 32 * each for block, each in zip(blocks[:16], found, strict=False))


def test_programs_that_share_rows_have_half_of_the_warps_of_a_gpu(monkeypatch):
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda _: SimpleNamespace(multi_processor_count=132),
    )
    gpu = torch.device("cuda")
    for warps, each in ((4, 8), (8, 4), (16, 2), (64, 1)):  # a multiprocessor holds 64 warps
        assert launch.resident_programs(gpu, 10**6, warps) == each * 132
    assert launch.resident_programs(gpu, 5, 4) == 5
    assert launch.resident_programs(torch.device("cpu"), 2, 4) == 2  # few, so that some share rows
    assert 1 < launch.resident_programs(torch.device("cpu"), 100, 4) < 10


def test_a_number_is_the_sum_of_two_of_float32():
    for number in (0.1, 1 / 3, -2.5, 1e-3, 4 / 3):
        first, rest = launch.two_floats(number)
        assert first == float(torch.tensor(number, dtype=torch.float32))
        assert first + rest == number and abs(rest) <= abs(number) * 2**-24


def test_a_program_has_up_to_1024_elements_of_one_row():
    for rows, width, programs in ((6, 1024, 6), (6, 1025, 12), (3, 2500, 9), (7, 1, 7)):
        assert launch.elementwise_grid(torch.empty(rows, width), width) == (programs,)


def test_float64_alone_is_computed_in_float64():
    import triton.language as tl

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert launch.accumulator(dtype) is tl.float32
        assert launch.accumulator_dtype(dtype) is torch.float32
    assert launch.accumulator(torch.float64) is tl.float64
    assert launch.accumulator_dtype(torch.float64) is torch.float64
