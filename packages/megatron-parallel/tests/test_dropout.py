"""Dropout: quality of the hash, equal masks on all layouts, and gradients."""

import itertools
import math
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from megatron_parallel import (
    ColumnParallelLinear,
    DropoutKey,
    GradientBuffers,
    LayoutError,
    Mesh,
    ParallelLayout,
    RowParallelLinear,
    _compat,
    collect_shardings,
    keyed_dropout,
    keyed_uniform,
    parameter_views,
)
from megatron_parallel.collectives import gather_sequence
from megatron_parallel.dropout import DropoutFusion, dropout_fusion, keep_mask
from megatron_parallel.dropout.hash import bits
from megatron_parallel.testing import WorkerPool
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

PLACE = {"layer": 3, "site": 1}
COMPILER = any(shutil.which(name) for name in ("c++", "g++", "clang++"))


def key_of(
    *, seed: int = 1234, iteration: int = 7, samples: Any = 2, positions: Any = 64
) -> DropoutKey:
    if isinstance(samples, int):
        samples = torch.arange(samples)
    return DropoutKey.for_batch(
        seed=seed, iteration=iteration, samples=samples, positions=positions
    )


# -- the bits ----------------------------------------------------------------------------------


def reference_bits(number: int, key0: int, key1: int) -> int:
    """Computes the documented hash with Python integers."""
    z = number % 2**32 ^ key0 % 2**32
    z ^= z >> 17
    z = z * 0xED5AD4BB % 2**32 ^ key1 % 2**32
    z ^= z >> 11
    z = z * 0xAC4C1B51 % 2**32
    z ^= z >> 15
    z = z * 0x31848BAB % 2**32
    return z ^ z >> 14


def reference_hash(
    seed: int, iteration: int, sample: int, position: int, layer: int, site: int, channel: int
) -> int:
    """Returns the word that is compared with `p`, as a signed number."""
    words = 0x243F6A88, 0x85A308D3
    numbers = (seed, seed >> 32, iteration, iteration >> 32, sample, sample >> 32, position)
    for number in numbers:
        words = reference_bits(number, *words), reference_bits(~number, *reversed(words))
    word0 = words[0] + reference_bits(layer, 0x13198A2E, site)
    word1 = words[1] ^ reference_bits(site, 0x03707344, layer)
    word = reference_bits(channel, word0, word1)
    return word - 2**32 if word >= 2**31 else word


def test_the_mask_is_the_documented_hash() -> None:
    samples = torch.tensor([0, 5, 2**40 + 3])
    key = key_of(seed=2**63 - 5, iteration=2**33 + 1, samples=samples, positions=4)
    for p, layer in itertools.product((0.1, 0.5, 0.97), (0, -1, 61)):
        mask = keep_mask((4, 3, 50), p, key, layer=layer, site=2, channels=2**31 - 20)
        for s, b, c in itertools.product(range(4), range(3), range(50)):
            bits = reference_hash(
                2**63 - 5, 2**33 + 1, int(samples[b]), s, layer, 2, 2**31 - 20 + c
            )
            assert mask[s, b, c].item() == (bits >= round(p * 2**32) - 2**31)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1e-4])
def test_the_fraction_of_kept_elements_is_right_at_every_site(p: float) -> None:
    shape = (64, 2, 1024)
    count = math.prod(shape)
    deviation = math.sqrt(count * p * (1 - p))
    for layer, site in itertools.product(range(6), range(4)):
        dropped = count - keep_mask(shape, p, key_of(), layer=layer, site=site).sum().item()
        assert abs(dropped - count * p) < 5 * deviation


def test_counts_of_rows_and_columns_have_binomial_variance() -> None:
    """Counts of kept elements per position and per channel have a binomial variance."""
    mask = keep_mask((2048, 1, 2048), 0.25, key_of(samples=1, positions=2048), **PLACE)
    for dim in (0, 2):
        counts = mask.sum(dim=dim, dtype=torch.float64).flatten()
        variance = counts.var().item() / (2048 * 0.25 * 0.75)
        assert abs(variance - 1) < 5 * math.sqrt(2 / 2047)


NEIGHBOURS = {
    "channel": {"channels": 1},
    "far channel": {"channels": 1024},
    "layer": {"layer": 4},
    "site": {"site": 2},
    "layer and site": {"layer": 1, "site": 3},  # both exchanged
    "seed": {"seed": 1235},
    "high seed": {"seed": 1234 + 2**32},
    "iteration": {"iteration": 8},
    "seed and iteration": {"seed": 7, "iteration": 1234},
    "sample": {"samples": torch.arange(1, 3)},
    "position": {"positions": torch.arange(1, 65)},
    "sample and position": {"samples": torch.arange(64), "positions": 2, "swap": True},
}


@pytest.mark.parametrize("p", [0.5, 0.1])
@pytest.mark.parametrize("changed", NEIGHBOURS)
def test_neighbouring_counters_give_unrelated_masks(changed: str, p: float) -> None:
    change = dict(NEIGHBOURS[changed])
    swap = change.pop("swap", False)
    place = {**PLACE, "channels": 0}
    place_change = {name: change.pop(name) for name in list(change) if name in place}
    shape = (64, 2, 4096)
    one = keep_mask(shape, p, key_of(), **place)
    if swap:
        two = keep_mask((2, 64, 4096), p, key_of(**change), **place).transpose(0, 1)
    else:
        two = keep_mask(shape, p, key_of(**change), **{**place, **place_change})
    a, b = one.double() - (1 - p), two.double() - (1 - p)
    correlation = (a * b).mean().item() / (p * (1 - p))
    # Elements with equal sample and position are the same after the exchange.
    shared = 2 * 4096 / one.numel() if swap else 0.0
    assert abs(correlation - shared) < 5 / math.sqrt(one.numel())


def test_elements_are_not_correlated_within_a_mask() -> None:
    mask = keep_mask((512, 4, 1024), 0.3, key_of(samples=4, positions=512), **PLACE)
    centred = mask.double() - 0.7
    for dim, lag in itertools.product(range(3), (1, 2, 3)):
        a = centred.narrow(dim, 0, centred.shape[dim] - lag)
        b = centred.narrow(dim, lag, centred.shape[dim] - lag)
        assert abs((a * b).mean().item()) / 0.21 < 5 / math.sqrt(a.numel())


def test_every_byte_of_the_hash_is_uniform_and_so_are_pairs() -> None:
    """Chi-square tests of each byte, and of pairs of half bytes of neighbours."""
    key = key_of(samples=4, positions=256)
    hashed = bits(torch.arange(1024, dtype=torch.int32), key.word0[..., None], key.word1[..., None])
    unsigned = hashed.long() & 0xFFFFFFFF
    half = (unsigned >> 28).flatten()
    tables = [unsigned >> shift & 0xFF for shift in (0, 8, 16, 24)]
    tables.append((half[1:] << 4) | half[:-1])
    for values in tables:
        counts = torch.bincount(values.flatten(), minlength=256).double()
        expected = counts.sum() / 256
        chi_square = ((counts - expected) ** 2 / expected).sum().item()
        assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)


def test_every_input_bit_moves_every_output_bit_half_of_the_time() -> None:
    generator = torch.Generator().manual_seed(1)
    count = 20_000
    draws = torch.randint(-(2**31), 2**31, (3, count), generator=generator).to(torch.int32)
    base = bits(*draws)
    for which, bit in itertools.product(range(3), range(32)):
        flipped = draws.clone()
        flipped[which] ^= -(2**31) if bit == 31 else 1 << bit
        change = base ^ bits(*flipped)
        share = ((change[:, None] >> torch.arange(32)) & 1).double().mean(dim=0)
        assert (share - 0.5).abs().max().item() < 0.5 * 6 / math.sqrt(count)


# -- the operation -----------------------------------------------------------------------------


def test_probability_zero_returns_the_tensor_itself() -> None:
    x = torch.randn(64, 2, 3)
    assert keyed_dropout(x, 0.0, key_of(), **PLACE) is x


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_kept_elements_are_scaled_and_others_are_zero(dtype: torch.dtype) -> None:
    x = torch.randn(64, 2, 5, 7, dtype=dtype)
    x[0, 0, 0, 0] = math.inf
    y = keyed_dropout(x, 0.25, key_of(), **PLACE)
    mask = keep_mask(tuple(x.shape), 0.25, key_of(), **PLACE)
    assert y.dtype == dtype
    assert torch.equal(y, torch.where(mask, x * (1 / 0.75), 0.0))
    assert 0.2 < (~mask).double().mean().item() < 0.3


def test_large_tensors_are_processed_in_slices_with_the_same_mask() -> None:
    x = torch.ones(50, 3, 4000)
    key = key_of(samples=3, positions=50)
    assert torch.equal(
        keyed_dropout(x, 0.5, key, **PLACE) > 0, keep_mask((50, 3, 4000), 0.5, key, **PLACE)
    )


def test_gradients_use_the_same_mask() -> None:
    x = torch.randn(8, 2, 3, dtype=torch.float64, requires_grad=True)
    key = key_of(positions=8)
    assert torch.autograd.gradcheck(lambda x: keyed_dropout(x, 0.4, key, **PLACE), (x,))


def test_the_mask_is_not_stored_for_the_backward_pass() -> None:
    x = torch.randn(64, 2, 1000, requires_grad=True)
    key, saved = key_of(), []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        keyed_dropout(x, 0.1, key, **PLACE)
    assert sum(tensor.numel() for tensor in saved) == 2 * 64 * 2  # the key


def test_recomputation_sees_the_same_mask() -> None:
    x = torch.randn(64, 2, 10, dtype=torch.float64)
    weight = nn.Parameter(torch.randn(10, 10, dtype=torch.float64))
    key = key_of()

    def block(x: Tensor) -> Tensor:
        return keyed_dropout((x @ weight).tanh(), 0.3, key, **PLACE)

    gradients = []
    for recompute in (False, True):
        y = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        gradients += torch.autograd.grad(y.square().sum(), weight)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, math.nan])
def test_a_probability_out_of_range_is_refused(p: float) -> None:
    with pytest.raises(LayoutError, match="is not in 0 <= p < 1"):
        keyed_dropout(torch.ones(64, 2, 3), p, key_of(), **PLACE)


def test_a_key_of_another_shape_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"shape \(2, 64, 3\) with a key for \(64, 2\)"):
        keyed_dropout(torch.ones(2, 64, 3), 0.1, key_of(), **PLACE)


# -- layouts -----------------------------------------------------------------------------------


def test_any_part_of_a_tensor_has_its_part_of_the_mask() -> None:
    """Cuts samples, positions, heads and channels, into ranges and in any order."""
    whole = keep_mask((12, 6, 8, 10), 0.4, key_of(samples=6, positions=12), **PLACE)
    samples = key_of(samples=torch.tensor([4, 1]), positions=12)
    assert torch.equal(keep_mask((12, 2, 8, 10), 0.4, samples, **PLACE), whole[:, [4, 1]])
    later = key_of(samples=6, positions=torch.tensor([0, 5, 3]))
    assert torch.equal(keep_mask((3, 6, 8, 10), 0.4, later, **PLACE), whole[[0, 5, 3]])
    key = key_of(samples=6, positions=12)
    heads = keep_mask((12, 6, 2, 10), 0.4, key, **PLACE, channels=6 * 10)
    assert torch.equal(heads, whole[:, :, 6:])
    numbers = torch.arange(8)[:, None] * 10 + torch.tensor([9, 2])
    assert torch.equal(
        keep_mask((12, 6, 8, 2), 0.4, key, **PLACE, channels=numbers), whole[..., [9, 2]]
    )
    for rank in range(4):
        axis = Mesh(ParallelLayout(tp=4).resolve(4), rank).axis("tp")
        part = keep_mask((3, 6, 8, 10), 0.4, key.shard(axis), **PLACE)
        assert torch.equal(part, whole[3 * rank : 3 * rank + 3])
    with pytest.raises(LayoutError, match="sequence of 12 cannot be cut into 5"):
        key.shard(Mesh(ParallelLayout(tp=5).resolve(5), 0).axis("tp"))


SEQUENCE, SAMPLES, HIDDEN, FFN = 8, 4, 6, 12


def block_gradients(
    mesh: Mesh, sequence_parallel: bool, forget_channels: bool = False
) -> dict[str, Tensor]:
    """Returns loss and gradients of an MLP with dropout on cut channels and cut positions."""
    tp, dp = mesh.axis("tp"), mesh.axis("dp")
    kwargs: dict[str, Any] = {"sequence_parallel": sequence_parallel, "dtype": torch.float64}
    model = nn.ModuleDict(
        {
            "up": ColumnParallelLinear(HIDDEN, FFN, mesh, **kwargs),
            "down": RowParallelLinear(FFN, HIDDEN, mesh, **kwargs),
        }
    )
    table = collect_shardings(model)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        value = torch.randn(table[name].shape, generator=generator, dtype=torch.float64)
        parameter.data = value[table[name].box(mesh).slices].clone()
    x = torch.randn(SEQUENCE, SAMPLES, HIDDEN, generator=generator, dtype=torch.float64)

    mine = torch.arange(SAMPLES).chunk(dp.size)[dp.index]
    key = DropoutKey.for_batch(seed=1, iteration=5, samples=mine, positions=SEQUENCE)
    x = x[:, mine]
    hidden_key = key
    if sequence_parallel:
        x, hidden_key = x.chunk(tp.size)[tp.index], key.shard(tp)
    first = 0 if forget_channels else tp.index * (FFN // tp.size)
    x = keyed_dropout(x, 0.2, hidden_key, layer=0, site=0)
    y = keyed_dropout(functional.gelu(model["up"](x)), 0.3, key, layer=0, site=1, channels=first)
    z = keyed_dropout(model["down"](y), 0.1, hidden_key, layer=0, site=2)
    if sequence_parallel:
        z = gather_sequence(z, tp)
    loss = z.square().sum()
    buffers = GradientBuffers(model.named_parameters(), table, mesh)
    # All ranks compute the loss of the gathered sequence, and their gradients are summed.
    (loss / (tp.size if sequence_parallel else 1)).backward()
    buffers.finish()
    views = parameter_views(buffers.gradients(), table, mesh)
    return {"loss": loss.detach()} | {
        name: (view.tensor, view.offsets) for name, (view,) in views.items()
    }


CASES = [(2, 1, False), (2, 1, True), (1, 2, False), (2, 2, True), (4, 1, True)]


@pytest.mark.parametrize(("tp", "dp", "sequence_parallel"), CASES)
def test_an_mlp_with_dropout_is_the_same_on_every_layout(
    worker_pool: WorkerPool, tp: int, dp: int, sequence_parallel: bool
) -> None:
    truth = block_gradients(Mesh.single(), False)
    layout = ParallelLayout(tp=tp, dp=dp)
    results = worker_pool.run_mesh(layout, block_gradients, sequence_parallel)
    copies = [results[rank] for rank in range(0, tp * dp, tp)]
    total = sum(result["loss"] for result in copies)
    torch.testing.assert_close(total, truth["loss"], rtol=1e-12, atol=0)
    for result in results:
        for name in result.keys() - {"loss"}:
            (gradient, offsets), expected = result[name], truth[name][0]
            for dim, (start, length) in enumerate(zip(offsets, gradient.shape, strict=True)):
                expected = expected.narrow(dim, start, length)
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_channels_that_ignore_the_rank_are_detected(worker_pool: WorkerPool) -> None:
    truth = block_gradients(Mesh.single(), False)["loss"]
    results = worker_pool.run_mesh(ParallelLayout(tp=2, dp=1), block_gradients, False, True)
    assert abs(results[0]["loss"] - truth) > 1e-3 * truth


# -- compiled ----------------------------------------------------------------------------------

COMPILED = """
import sys
import torch
from megatron_parallel import DropoutKey, keyed_dropout

def run(x, key):
    return keyed_dropout(x, 0.3, key, layer=2, site=1, channels=40).square()

compiled = torch.compile(run, fullgraph=True, backend=sys.argv[1])
torch._dynamo.config.error_on_recompile = True
for iteration in range(3):
    x = torch.randn(32, 2, 80, dtype=torch.float64, requires_grad=True)
    key = DropoutKey.for_batch(seed=3, iteration=iteration, samples=torch.arange(2), positions=32)
    results = []
    for function in (run, compiled):
        y = function(x, key)
        results.append((y, *torch.autograd.grad(y.sum(), x)))
    for one, other in zip(*results):
        assert torch.equal(one == 0, other == 0)
        assert torch.allclose(one, other, rtol=1e-14, atol=0)
"""


FUSED = """
import torch
from torch._dynamo.utils import counters
from torch._inductor import metrics
from megatron_parallel import DropoutKey
from megatron_parallel.dropout import dropout
from megatron_parallel.dropout.key import DropoutSite

def check(x, p, layer, site, channels=0):
    s, b = x.shape[:2]
    key = DropoutKey.for_batch(seed=3, iteration=1, samples=torch.arange(b), positions=s)
    operands = x, key.word0, key.word1, channels, DropoutSite.of(p, layer, site)
    one, other = dropout._fused(*operands), dropout._eager(*operands)
    assert torch.equal(one.view(torch.int16), other.view(torch.int16))

x = torch.linspace(-1, 1, 32 * 2 * 48).view(32, 2, 48).bfloat16()
for layer in range(6):
    for site in range(3):
        check(x, 0.1, layer, site)
check(x[:16], 0.1, 1, 1)  # other lengths
check(torch.cat([x, x], 2), 0.1, 1, 1)
assert counters["stats"]["unique_graphs"] == metrics.generated_kernel_count == 1
check(x.view(32, 2, 4, 12), 0.5, 1, 1, torch.arange(48).view(4, 12))
check(x, 0.1, 1, 1, 2**31 - 20)
assert counters["stats"]["unique_graphs"] == metrics.generated_kernel_count == 3
"""


@pytest.mark.slow
@pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")
def test_fused_dropout_is_one_kernel_with_equal_bits_for_all_layers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FUSED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_fusion_reports_why_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "dropout is not fused: on a CPU it runs in slices that fit into the cache"
    assert str(dropout_fusion(torch.device("cpu"))) == line
    monkeypatch.setattr(_compat, "why_not_compiled", lambda: "Triton is not installed")
    absent = dropout_fusion.__wrapped__(torch.device("cuda"))
    assert absent == DropoutFusion(False, "Triton is not installed")
    # Where there is a compiler, it is tried: on a device without values nothing can be equal.
    monkeypatch.setattr(_compat, "why_not_compiled", lambda: None)
    failed = dropout_fusion.__wrapped__(torch.device("meta"))
    assert not failed.fused and "torch.compile fails: " in failed.reason


@pytest.mark.gpu
def test_keys_and_masks_are_computed_on_the_device(
    device: torch.device, device_waits: Callable[[], AbstractContextManager[Counter[str]]]
) -> None:
    samples = torch.arange(2, 4, device=device)
    x = torch.ones(8, 2, 6, device=device, requires_grad=True)
    dropout_fusion(device)  # may compile
    with device_waits() as waits:
        key = DropoutKey.for_batch(seed=5, iteration=3, samples=samples, positions=8)
        y = keyed_dropout(x, 0.5, key, layer=1, site=2, channels=12)
        y.sum().backward()
        keep_mask((8, 2, 6), 0.5, key, layer=1, site=2)
        keyed_uniform((8, 2, 6), key, layer=1, site=3, dtype=torch.float32)
    assert waits == Counter()
    assert torch.equal(x.grad.cpu(), y.detach().cpu())


@pytest.mark.slow
def test_compiled_dropout_is_one_graph_with_the_same_mask_without_recompilation() -> None:
    """Runs in a new process: Dynamo cannot trace type-checked functions."""
    command = [sys.executable, "-c", COMPILED, "inductor" if COMPILER else "aot_eager"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
