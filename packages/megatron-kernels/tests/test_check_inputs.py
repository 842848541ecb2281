"""Inputs of checks: numbers, sizes, keys of dropout, and rows that a careless kernel spoils."""

import pytest
import torch
from megatron_kernels import DropoutSite
from megatron_kernels.cases import CASES
from megatron_kernels.inputs import CaseDropout, InputGenerator, Size, draw_words, of_rows
from torch import Tensor

CPU = torch.device("cpu")
F64 = torch.float64
DRAW = InputGenerator(F64, CPU)


def test_numbers_are_the_same_in_every_dtype_and_differ_between_seeds_and_shapes() -> None:
    exact = DRAW.normal(40, 25)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(InputGenerator(dtype, CPU).normal(40, 25), exact.to(dtype))
    assert not torch.equal(InputGenerator(F64, CPU, seed=1).normal(40, 25), exact)
    assert not torch.equal(DRAW.normal(40, 26)[:, :25], exact)
    assert exact.requires_grad and exact.is_leaf
    values = exact.detach()
    assert abs(float(values.mean())) < 0.1 and abs(float(values.std()) - 1) < 0.1
    torch.testing.assert_close(DRAW.normal(40, 25, mean=2.5), exact + 2.5)


def test_integers_are_below_a_limit_and_reach_both_ends() -> None:
    found = DRAW.integers(5, 20, 10)
    assert found.dtype == torch.int64 and found.shape == (20, 10)
    assert found.unique().tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(found, InputGenerator(torch.float16, CPU).integers(5, 20, 10))


@pytest.mark.parametrize(
    ("size", "rows", "of_sequences"),
    [("small", 9, 9), ("empty", 0, 0), ("one", 1, 1), ("large", 207, 207), ("many", 5000, 207)],
)
def test_sizes_are_none_one_hundreds_or_thousands_of_rows(
    size: Size, rows: int, of_sequences: int
) -> None:
    draw = InputGenerator(F64, CPU, size=size)
    assert draw.rows(9) == rows
    assert draw.rows(9, sequence=True) == of_sequences
    assert draw.rows(0) == (1 if size == "one" else 0)  # a group without rows has none


def test_thousands_of_rows_add_up_to_half_in_16_bits() -> None:
    count = InputGenerator(torch.bfloat16, CPU, size="many").rows(7)
    total = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(count):
        total += 1.0
    assert float(total) < count / 2


def test_words_of_keys_are_signed_numbers_of_32_bits() -> None:
    first, second = draw_words(DRAW, 200, 3)
    for words in (first, second):
        assert words.shape == (200, 3) and words.dtype == torch.int32
        assert words.min() < -(2**30) and words.max() > 2**30
        assert len(words.unique()) > 590
    assert not torch.equal(first, second)


def dropped(dropout: CaseDropout, heads: int, keys: int) -> Tensor:
    """Returns which elements of all heads are dropped, `[b, n, s, t]`."""
    queries, batch = dropout.word0.shape
    return dropout(torch.ones(batch, heads, queries, keys, dtype=F64)) == 0


def test_a_quarter_is_dropped_and_the_rest_keeps_the_sum() -> None:
    dropout = CaseDropout(*draw_words(DRAW, 40, 2))
    found = dropout(torch.ones(2, 3, 40, 50, dtype=F64))
    assert found.unique().tolist() == [0.0, 4 / 3]
    assert dropout.probability == 0.25
    assert abs(float((found == 0).double().mean()) - 0.25) < 0.02
    for dim in range(4):  # not the same for all samples, heads, queries or keys
        assert not torch.equal(found.select(dim, 0), found.select(dim, 1))
    site: DropoutSite = dropout.site
    assert (site.least + 2**31) / 2**32 == dropout.probability


def test_channels_are_counted_from_the_first_head_and_columns_within_heads() -> None:
    words = draw_words(DRAW, 9, 2)
    plain = dropped(CaseDropout(*words), 2, 8)
    from_second = dropped(CaseDropout(*words, first_head=4), 1, 8)  # 3 is the first by default
    assert torch.equal(from_second, plain[:, 1:])
    one_head_on = torch.arange(1000, 1008)[None]  # a head has 1000 columns by default
    assert torch.equal(dropped(CaseDropout(*words, one_head_on), 1, 8), plain[:, 1:])
    given = CaseDropout(*words, torch.arange(8)[None])
    assert torch.equal(dropped(given, 2, 8), plain)
    own = torch.stack((torch.arange(8), torch.arange(8).flip(0)))  # columns of each sample
    found = dropped(CaseDropout(*words, own), 2, 8)
    assert torch.equal(found[0], plain[0]) and torch.equal(found[1].flip(-1), plain[1])


def test_a_part_of_samples_heads_queries_and_keys_is_that_of_the_whole() -> None:
    dropout = CaseDropout(*draw_words(DRAW, 9, 3))
    kept = dropout.kept(slice(1, 3), slice(1, 2), 8)(slice(2, 7), slice(3, 5))
    assert torch.equal(kept == 0, dropped(dropout, 2, 8)[1:3, 1:2, 2:7, 3:5])


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(0, []), (2, [7, 8]), (3, [7, 8, 9]), (4, [7, 7, 8, 8]), (7, [7, 7, 7, 8, 8, 8, 9])],
)
def test_columns_of_documents_are_cut_or_stretched(rows: int, expected: list[int]) -> None:
    assert of_rows(torch.tensor([[7, 8, 9]]), rows).tolist() == [expected]


def arguments(name: str, label: str) -> tuple[object, ...]:
    (case,) = (each for each in CASES if (each.op.name, each.label) == (name, label))
    names = case.op.signature.__annotations__
    found = dict(zip(names, case.arguments(InputGenerator(torch.float32, CPU)), strict=False))
    return tuple(found.values())


def test_cases_have_rows_that_a_careless_kernel_would_turn_into_nan() -> None:
    _, allowed, _ = arguments("softmax", "masked")
    assert isinstance(allowed, Tensor) and not allowed.any(-1).all() and allowed.any()
    _, targets = arguments("cross_entropy", "")
    assert isinstance(targets, Tensor) and (targets == -100).any() and (targets >= 0).any()
    _, targets, valid = arguments("vocab_cross_entropy", "padding")
    assert isinstance(targets, Tensor) and isinstance(valid, int)
    assert (targets < 0).any() and (targets >= valid).any()
    assert ((targets >= 0) & (targets < valid)).any()
    for label in ("", "padding", "padding alone"):  # targets of parts before and after this one
        logits, targets, _ = arguments("vocab_cross_entropy", label)
        assert isinstance(targets, Tensor) and isinstance(logits, Tensor)
        assert (targets < 0).any() and (targets >= logits.shape[-1]).any()
    dloss = arguments("vocab_cross_entropy_gradient", "")[3]
    assert isinstance(dloss, Tensor) and 0 < int((dloss == 0).sum()) < dloss.numel()
    assert arguments("vocab_cross_entropy", "padding alone")[2] == 0
    weight, tokens, start = arguments("vocab_embedding", "")
    assert isinstance(weight, Tensor) and isinstance(tokens, Tensor) and isinstance(start, int)
    assert (tokens < start).any() and (tokens >= start + len(weight)).any()
    counts = arguments("grouped_matmul", "")[2]
    assert isinstance(counts, Tensor) and (counts == 0).any() and (counts == 1).any()
    tailed = arguments("grouped_matmul", "tail")
    assert isinstance(tailed[0], Tensor) and isinstance(tailed[2], Tensor)
    assert len(tailed[0]) > tailed[2].sum() and tailed[3] is True
    whole = arguments("grouped_matmul", "")
    assert isinstance(whole[0], Tensor) and len(whole[0]) == counts.sum() and whole[3] is False


def test_cases_have_fewer_rows_than_choices_and_rows_of_no_choice() -> None:
    few = arguments("permute", "fewer rows than choices")
    assert isinstance(few[0], Tensor) and isinstance(few[1], Tensor)
    assert len(few[1]) < 3 * len(few[0])
    order = arguments("permute", "")[1]
    assert isinstance(order, Tensor) and order[-2:].tolist() == [6, 7]  # of no expert
    none = arguments("unpermute", "rows of no choice")[1]
    assert isinstance(none, Tensor) and (none == -1).any() and (none >= 0).any()


def test_sites_of_dropout_scale_by_what_they_keep() -> None:
    for label in ("", "bias"):
        given = arguments("bias_dropout_add", label)
        site = given[-1]
        assert isinstance(site, DropoutSite)
        assert site.scale == pytest.approx(1 / (1 - (site.least + 2**31) / 2**32), rel=1e-15)
        assert (given[1] is not None) == (label == "bias")


def test_cases_of_smoothing_spread_what_the_target_loses() -> None:
    label = "padding, smoothing, in place"
    *_, valid, smoothing, everywhere, overwrites = arguments("vocab_cross_entropy_gradient", label)
    logits = arguments("vocab_cross_entropy_gradient", label)[0]
    assert isinstance(logits, Tensor) and valid == 30 < logits.shape[-1]
    assert smoothing == pytest.approx(1 - 0.01 * logits.shape[-1]) and everywhere == 0.01
    assert overwrites is True
