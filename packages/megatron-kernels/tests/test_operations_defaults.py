"""Defaults of operations: those of torch's functions of the same name, or of the papers."""

import math
from typing import Any

import pytest
import torch
from megatron_kernels import (
    add_layer_norm,
    add_rms_norm,
    add_vocab_gradient,
    bias_dropout_add,
    bias_gelu,
    cross_entropy,
    gelu,
    glu,
    layer_norm,
    linear,
    pointwise,
    rms_norm,
    rope,
    rope_qkv,
    select_rows,
    softmax,
    swiglu,
    vocab_cross_entropy,
    vocab_cross_entropy_gradient,
    vocab_embedding,
)
from megatron_kernels.errors import KernelError
from megatron_kernels.ops.dropout.bias_dropout_add import DropoutSite, hashes
from megatron_kernels.ops.norm import apex
from megatron_kernels.ops.rope.rope import joined
from torch import Tensor
from torch.nn import functional

F64 = torch.float64
both = pytest.mark.parametrize("backend", ["torch", "reference"])


def drawn(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype)


@pytest.mark.parametrize("backend", ["torch", "batch-invariant", "reference"])
def test_norms_add_what_torchs_add_by_default(backend: str) -> None:
    x, gain, shift = drawn(5, 8) * 2e-3, drawn(8), drawn(8)  # so that epsilon matters
    layer = functional.layer_norm(x, (8,), gain, shift)
    root_mean_square = functional.rms_norm(x, (8,), gain, 1e-5)
    added = drawn(5, 8) * 1e-3
    close: Any = torch.testing.assert_close
    close(layer_norm(x, gain, shift, backend=backend), layer)
    close(rms_norm(x, gain, backend=backend), root_mean_square)
    for found, expected in (
        (add_layer_norm(x - added, added, gain, shift, backend=backend), layer),
        (add_rms_norm(x - added, added, gain, backend=backend), root_mean_square),
        (add_layer_norm(x, None, gain, shift, backend=backend), layer),
    ):
        close(found[0], x)
        close(found[1], expected)


@pytest.mark.parametrize("backend", ["torch", "batch-invariant", "reference"])
def test_a_norm_without_a_gain_has_a_mean_square_of_one(backend: str) -> None:
    x = drawn(5, 8)
    expected = functional.rms_norm(x, (8,), None, 1e-5)
    for zero_centered in (False, True):
        found = rms_norm(x, None, 1e-5, zero_centered, backend=backend)
        torch.testing.assert_close(found, expected)
        summed = add_rms_norm(x, None, None, 1e-5, zero_centered, backend=backend)
        torch.testing.assert_close(summed[1], expected)


@pytest.mark.parametrize("backend", ["torch", "batch-invariant"])
def test_products_of_two_dtypes_are_computed_by_their_definition_only(backend: str) -> None:
    x, weight, bias = (drawn(*shape).bfloat16() for shape in ((3, 8), (5, 8), (5,)))
    expected = x.double() @ weight.double().t()
    for given in ((x, weight.float(), bias), (x, weight, bias.float()), (x, weight.float(), None)):
        with pytest.raises(KernelError, match=r"x is torch\.bfloat16, weight .*; they must agree"):
            linear(*given, backend=backend)
        shifted = expected if given[2] is None else expected + bias.double()
        torch.testing.assert_close(linear(*given).double(), shifted, rtol=1e-2, atol=1e-2)
    for whole in ((x, weight, bias), (x, weight, None)):
        assert linear.explain(*whole, backend=backend).backend == backend


@both
def test_activations_are_exact_unbounded_and_without_an_offset_by_default(backend: str) -> None:
    x, bias = 20 * drawn(4, 2, 6), drawn(6)
    close: Any = torch.testing.assert_close
    close(gelu(x, backend=backend), functional.gelu(x))
    close(bias_gelu(x, bias, backend=backend), functional.gelu(x + bias))
    close(glu(x, "silu", backend=backend), swiglu(x, backend=backend))
    close(swiglu(x, backend=backend), functional.silu(x[:, 0]) * x[:, 1])
    close(softmax(x, backend=backend), torch.softmax(x, -1))


@both
def test_rotation_pairs_halves_and_repeats_no_keys_by_default(backend: str) -> None:
    angles = drawn(3, 1, 2)
    tables = angles.cos(), angles.sin()
    fused = drawn(3, 2, 1, 5, 6)
    q, k, v = rope_qkv(fused, *tables, backend=backend)
    assert (q.shape, k.shape, v.shape) == ((3, 2, 3, 6), (3, 2, 1, 6), (3, 2, 1, 6))
    c, s = (table[:, :, None] for table in tables)
    for found, x in ((q, fused[:, :, 0, :3]), (k, fused[:, :, :, 3])):
        first, second = x[..., :2], x[..., 2:4]
        expected = torch.cat((first * c - second * s, second * c + first * s, x[..., 4:]), -1)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(rope(x, *tables, backend=backend), expected)
    assert torch.equal(v, fused[:, :, :, 4])
    q, k, v = rope_qkv(fused, *tables, False, True, backend=backend)
    assert q.shape == k.shape == v.shape and torch.equal(v[:, :, 2], fused[:, :, 0, 4])


def test_keys_of_several_groups_are_not_repeated() -> None:
    table = torch.ones(3, 1, 2)
    for groups in (0, 2):
        with pytest.raises(KernelError, match=f"keys of one group, not of {groups}"):
            rope_qkv(torch.ones(3, 2, groups, 5, 6), table, table, repeat=True)


@both
def test_a_vocabulary_begins_at_its_first_token_and_ends_at_its_last(backend: str) -> None:
    weight, tokens = drawn(5, 3), torch.tensor([[0, 4], [2, 0]])
    rows = vocab_embedding(weight, tokens, backend=backend)
    assert torch.equal(rows, functional.embedding(tokens, weight))
    part = vocab_embedding(weight, torch.tensor([6, 7, 11, 12]), 7, backend=backend)
    assert torch.equal(part, torch.stack((0 * weight[0], weight[0], weight[4], 0 * weight[0])))


@both
def test_a_gradient_of_rows_is_added_by_default_and_overwrites_if_it_is_the_first(
    backend: str,
) -> None:
    tokens, dy = torch.tensor([[0, 4], [2, 0], [5, -1]]), drawn(3, 2, 3)
    expected = torch.zeros(5, 3, dtype=F64)
    expected[0], expected[2], expected[4] = dy[0, 0] + dy[1, 1], dy[1, 0], dy[0, 1]
    into = torch.full((5, 3), 8.0, dtype=F64)
    assert add_vocab_gradient(into, dy, tokens, backend=backend) is into
    torch.testing.assert_close(into, expected + 8)
    add_vocab_gradient(into, dy, tokens + 3, 3, True, backend=backend)
    torch.testing.assert_close(into, expected)


def test_the_gradient_of_a_loss_is_without_smoothing_and_in_new_memory_by_default() -> None:
    logits, targets = drawn(4, 7).requires_grad_(), torch.tensor([0, 6, 3, 3])
    losses = cross_entropy(logits, targets)
    dloss = torch.tensor([1.0, 0.5, 0.0, 2.0], dtype=F64)
    (expected,) = torch.autograd.grad(losses, logits, dloss)
    before, lse = logits.detach().clone(), logits.detach().logsumexp(-1)
    given = logits.detach().clone()
    given[2] = torch.nan  # its token has no loss
    found = vocab_cross_entropy_gradient(given, targets, lse, dloss, 7)
    torch.testing.assert_close(found, expected)
    assert torch.equal(given[:2], before[:2])
    again = vocab_cross_entropy_gradient(given, targets, lse, dloss, 7, 1.0, 0.0, True)
    assert again is given and torch.equal(again, found)


def test_columns_that_do_not_count_have_no_loss() -> None:
    logits, targets = torch.tensor([[3.0, 8.0], [4.0, 9.0]]), torch.tensor([0, 1])
    for valid, expected in (
        (0, ([-math.inf] * 2, [-math.inf] * 2, [0.0, 0.0])),
        (1, ([3.0, 4.0], [3.0, -math.inf], [3.0, 4.0])),
    ):
        found = vocab_cross_entropy(logits, targets, valid)
        assert tuple(each.tolist() for each in found) == expected


def triple32(x: int) -> int:
    """Returns the hash of C. Wellons' hash prospector, of which ours is a keyed form."""
    x = (x ^ x >> 17) * 0xED5AD4BB % 2**32
    x = (x ^ x >> 11) * 0xAC4C1B51 % 2**32
    x = (x ^ x >> 15) * 0x31848BAB % 2**32
    return x ^ x >> 14


def keyed(number: int, key0: int, key1: int) -> int:
    """Returns the hash with both words of a key, as a signed number."""
    x = (number ^ key0) % 2**32
    x = ((x ^ x >> 17) * 0xED5AD4BB % 2**32) ^ (key1 % 2**32)
    x = (x ^ x >> 11) * 0xAC4C1B51 % 2**32
    x = (x ^ x >> 15) * 0x31848BAB % 2**32
    x ^= x >> 14
    return x - 2**32 if x >= 2**31 else x


NUMBERS = [0, 1, 2, 4095, 2**31 - 1, 2**31, 2**32 - 1, 2**32 + 7]


def test_hashes_are_those_of_triple32_with_a_key() -> None:
    numbers = torch.tensor(NUMBERS)
    plain = hashes(numbers, torch.tensor(0), torch.tensor(0))
    assert [n % 2**32 for n in plain.tolist()] == [triple32(n % 2**32) for n in NUMBERS]
    for key0, key1 in ((5, 0), (0, 5), (-3, -(2**31)), (2**31 - 1, -1), (2**33 + 9, 2**32)):
        found = hashes(numbers, torch.tensor(key0), torch.tensor(key1)).tolist()
        assert found == [keyed(n, key0, key1) for n in NUMBERS]


def test_dropout_drops_hashes_below_the_least_and_scales_the_rest() -> None:
    x, bias, residual = drawn(2, 3, 40), drawn(40), drawn(2, 3, 40) + 5
    word0 = torch.tensor([[1, -(2**31), 7], [2**31 - 1, 0, -5]], dtype=torch.int32)
    word1 = torch.tensor([[-1, 3, 2**30], [0, -(2**31), 12]], dtype=torch.int32)
    site = DropoutSite(2**31 - 9, -17, -(2**30), 4 / 3)
    for shift in (None, bias):
        found = bias_dropout_add(x, shift, residual, word0, word1, site)
        for s in range(2):
            for b in range(3):
                key0, key1 = int(word0[s, b]) + site.word0, int(word1[s, b]) ^ site.word1
                kept = torch.tensor([keyed(c, key0, key1) >= site.least for c in range(40)])
                values = (x if shift is None else x + shift)[s, b] * site.scale
                expected = residual[s, b] + torch.where(kept, values, 0)
                torch.testing.assert_close(found[s, b], expected)
                assert 10 < int(kept.sum()) < 40
    equal = DropoutSite(0, 0, keyed(1, 0, 0), 2.0)  # the least hash itself is kept
    zero = torch.zeros(1, 1, dtype=torch.int32)
    ones = torch.ones(1, 1, 2, dtype=F64)
    assert float(bias_dropout_add(ones, None, 0 * ones, zero, zero, equal)[0, 0, 1]) == 2.0


COMPILED: dict[str, Any] = {
    **{f"glu {gate}": lambda x, gate=gate: glu(x, gate, 0.8, 0.5, backend="torch")
       for gate in ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu")},
    "swiglu": lambda x: swiglu(x, backend="torch"),
    "rows": lambda x: select_rows(x[:, 0], torch.tensor([[1, 0], [1, 3]])),
    "halves": lambda x: rope(x, x[:, :1, 0, :2].detach().cos(), x[:, :1, 0, :2].detach().sin(),
                             backend="torch"),
    "interleaved": lambda x: rope(x, x[:, :1, 0, :2].detach().cos(),
                                  x[:, :1, 0, :2].detach().sin(), True, backend="torch"),
    "all channels": lambda x: rope(x, x[:, :1, 0, :3].detach().cos(),
                                   x[:, :1, 0, :3].detach().sin(), backend="torch"),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_what_the_compiler_is_given_has_the_results_of_eager_code(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = drawn(4, 1, 2, 6) if name in ("halves", "interleaved", "all channels") else drawn(4, 2, 6)
    found = []
    for compiles in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiles=compiles: compiles)
        leaf = x.clone().requires_grad_()
        y = COMPILED[name](leaf)
        dy = torch.linspace(-1, 2, y.numel(), dtype=F64).view(y.shape)
        found.append((y.detach(), *torch.autograd.grad(y, leaf, dy)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
def test_joined_halves_are_the_rotation(interleaved: bool) -> None:
    x, angles = drawn(3, 2, 2, 6), drawn(3, 1, 2)
    expected = rope(x, angles.cos(), angles.sin(), interleaved, backend="reference")
    torch.testing.assert_close(joined(x, angles.cos(), angles.sin(), interleaved), expected)
    low = joined(x.bfloat16(), angles.cos().float(), angles.sin().float(), interleaved)
    assert low.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["relu", "squared_relu", "silu", "quick_gelu"])
def test_batch_invariant_activations_equal_their_definitions(kind: Any) -> None:
    x = drawn(6, 5).requires_grad_()
    found, expected = (pointwise(x, kind, backend=b) for b in ("batch-invariant", "reference"))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    of_found, of_expected = (torch.autograd.grad(y.sum(), x)[0] for y in (found, expected))
    torch.testing.assert_close(of_found, of_expected, rtol=1e-12, atol=1e-12)


def test_apex_refuses_what_it_does_not_compute() -> None:
    class OnCuda(Tensor):
        is_cuda = True

    x, gain = (t.as_subclass(OnCuda) for t in (torch.ones(2, 8), torch.ones(8)))
    shift = torch.zeros(8)
    for reason in (
        apex.layer_norm_unsupported_reason(x, gain, None, 1e-5),
        apex.rms_norm_unsupported_reason(x, None, 1e-5),
    ):
        assert reason in ("needs a bias", "needs a gain")
    for zero_centered, values, weight, reason in (
        (True, x, gain, "has no gain of 1 + weight"),
        (False, torch.ones(2, 8), gain, "needs a CUDA tensor, x is on cpu"),
        (False, x.double(), gain.double(), "got torch.float64 and torch.float64"),
        (False, x.half(), gain, "got torch.float16 and torch.float32"),
        (False, x, gain, "apex is "),
    ):
        options = values, weight, 1e-5, zero_centered
        assert reason in str(apex.rms_norm_unsupported_reason(*options))
        layer = values, weight, shift, 1e-5, zero_centered
        assert reason in str(apex.layer_norm_unsupported_reason(*layer))


@pytest.mark.parametrize("op", [layer_norm, rms_norm, add_layer_norm, add_rms_norm])
@pytest.mark.parametrize("backend", ["torch", "batch-invariant", "reference"])
def test_parameters_of_another_dtype_are_computed_by_their_definition_only(
    op: Any, backend: str
) -> None:
    x = drawn(5, 8, dtype=torch.bfloat16).requires_grad_()
    parameters = [drawn(8, dtype=torch.float32).requires_grad_()]
    parameters += [drawn(8, 1, dtype=torch.float32)[:, 0]] if "layer" in op.name else []
    given = (x, x, *parameters) if "add" in op.name else (x, *parameters)
    if backend == "torch":
        with pytest.raises(KernelError, match=r"bfloat16, weight torch\.float32.*agree"):
            op(*given, backend=backend)
        return
    exact = [each.detach().double() for each in given]
    found, expected = op(*given, backend=backend), op(*exact, backend="reference")
    if "add" in op.name:
        found, expected = found[1], expected[1]
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)
    assert torch.autograd.grad(found.sum(), parameters[0])[0].dtype == torch.float32


def test_reasons_name_the_dtypes_of_all_tensors() -> None:
    x, gain, shift = (drawn(*shape).bfloat16() for shape in ((5, 8), (8,), (8,)))
    weight, bias = drawn(3, 8).bfloat16(), drawn(3).bfloat16()
    start, end = "x is torch.bfloat16, weight torch.", "; they must agree"
    for op, given, dtypes in (
        (layer_norm, (x, gain.float(), shift), "float32, bias torch.bfloat16"),
        (layer_norm, (x, gain, shift.float()), "bfloat16, bias torch.float32"),
        (layer_norm, (x, gain.float(), None), "float32"),
        (rms_norm, (x, gain.double()), "float64"),
        (linear, (x, weight.float(), bias), "float32, bias torch.bfloat16"),
        (linear, (x, weight, bias.float()), "bfloat16, bias torch.float32"),
        (linear, (x, weight.float(), None), "float32"),
    ):
        statuses = op.explain(*given).statuses
        (found,) = (each.unsupported_reason for each in statuses if each.backend == "torch")
        assert found == start + dtypes + end


def test_rows_longer_than_a_slice_of_the_backward_pass_are_one_slice() -> None:
    """In 16 bits the rows are cut into slices of 2^18 numbers."""
    x, gain = drawn(2, 2**18 + 8).bfloat16(), torch.ones(2**18 + 8, dtype=torch.bfloat16)
    leaves = [x.requires_grad_(), gain.requires_grad_()]
    exact = [each.detach().double().requires_grad_() for each in leaves]
    for given in (leaves, exact):
        y = layer_norm(*given, None)
        y.backward(torch.ones_like(y))
    assert leaves[1].grad is not None and exact[1].grad is not None
    torch.testing.assert_close(leaves[1].grad.double(), exact[1].grad, rtol=1e-2, atol=1e-2)
