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


@pytest.mark.parametrize(
    ("programs", "per_group", "splits"),
    [(528, 8, 1), (527, 8, 2), (264, 8, 2), (263, 8, 4), (1, 8, 8), (150, 6, 6), (1, 1, 1)],
)
def test_heads_of_a_group_are_divided_evenly_over_four_programs_for_each_multiprocessor(
    programs, per_group, splits, monkeypatch
):
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda _: SimpleNamespace(multi_processor_count=132),
    )
    found = ssd_parts.splits_of_heads(torch.device("cuda"), programs, per_group)
    assert found == splits and per_group % found == 0
    on_cpu = ssd_parts.splits_of_heads(torch.device("cpu"), programs, per_group)
    assert per_group % on_cpu == 0 and (on_cpu == 1) == (programs > 100 or per_group == 1)


def test_limits_of_steps_are_finite_numbers_of_float32():
    largest = torch.finfo(torch.float32).max
    assert ssd_parts.limit_numbers(()) == [0.0] * 4
    low, low_rest, high, high_rest = ssd_parts.limit_numbers((0.1, float("inf")))
    assert (low, low_rest) == launch.two_floats(0.1)
    assert (high, high_rest) == (largest, 0.0)


def test_operands_of_a_scan_keep_the_mantissa_and_the_range():
    import triton.language as tl

    assert ssd_parts.operands(torch.bfloat16) == (tl.bfloat16, "tf32", torch.bfloat16)
    assert ssd_parts.operands(torch.float16) == (tl.float32, "tf32", torch.float32)
    assert ssd_parts.operands(torch.float32) == (tl.float32, "tf32x3", torch.float32)
    assert ssd_parts.operands(torch.float64) == (tl.float64, "ieee", torch.float64)
    for dtype, operand in ((torch.float32, tl.float32), (torch.bfloat16, tl.bfloat16)):
        assert attention_launch._operand(dtype) is operand
    assert [ssd_parts.block(n) for n in (1, 16, 17, 64, 65)] == [16, 16, 32, 64, 128]


def test_scans_have_few_stages_where_shared_memory_is_small(monkeypatch):
    for dtype, tokens, key in (
        (torch.bfloat16, 64, (2, 64)),
        (torch.bfloat16, 32, (2, 32)),
        (torch.float16, 32, (4, 32)),
        (torch.float32, 32, (4, 32)),
    ):
        x, whole = torch.zeros(1, dtype=dtype), ssd_parts.TILINGS[key]
        for large in (True, False):
            monkeypatch.setattr(ssd_parts, "has_data_center_memory", lambda _, n=large: n)
            found = ssd_parts.tiling(x, tokens)
            assert (found.width, found.warps) == (whole.width, whole.warps)
            assert found.stages == (whole.stages if large else (2, 1, 1))
