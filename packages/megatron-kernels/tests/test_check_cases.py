"""The calls that `megatron-kernels check` makes: each has what its label says."""

from typing import Any

import pytest
import torch
from megatron_kernels import Mask, Pages, attention_forward
from megatron_kernels.cases import CASES
from megatron_kernels.inputs import InputGenerator, Size

CPU = torch.device("cpu")
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


def calls(name: str, dtype: torch.dtype = F32, size: Size = "small") -> dict[str, dict[str, Any]]:
    """Returns the arguments of all calls of an operation, by label; absent ones are None."""
    found = {}
    for case in CASES:
        if case.op.name == name:
            names = list(case.op.signature.__annotations__)
            given = case.arguments(InputGenerator(dtype, CPU, size=size))
            found[case.label] = dict.fromkeys(names) | dict(zip(names, given, strict=False))
    return found


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"])
def test_calls_of_norms(name: str) -> None:
    for label, given in calls(name).items():
        assert bool(given["zero_centered"]) == (label == "1 + weight")
        assert given["weight"].requires_grad and given["x"].requires_grad
        if "layer" in name:
            assert (given["bias"] is None) == (label == "no bias")
        if "add" in name:
            assert (given["added"] is None) == (label == "nothing added")
        middle = float(given["weight"].detach().mean())  # near 0 if 1 is added to it
        assert (abs(middle) < 0.5) == (label == "1 + weight")


def test_calls_of_activations_and_softmax() -> None:
    for name in ("gelu", "bias_gelu"):
        for label, given in calls(name).items():
            assert given["approximate"] == {"exact": "none", "tanh": "tanh"}[label]
    for label, given in calls("glu").items():
        bounded = label == "bounds and offset"
        assert (given["bound"] > 0, given["offset"] > 0) == (bounded, bounded)
        assert bounded or given["gate"] == label.replace(" ", "_")
    assert {given["kind"].replace("_", " ") for given in calls("pointwise").values()} == {
        *calls("pointwise")
    }
    for label, given in calls("softmax").items():
        assert (given["allowed"] is not None) == (label == "masked")
        if label == "masked":  # not in all places of a row
            assert 0 < float(given["allowed"][0].double().mean()) < 1
    for label, given in calls("linear").items():
        assert (given["bias"] is None) == (len(given["x"]) > 64) == (label == "several tiles")


@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
def test_calls_of_rotations(dtype: torch.dtype) -> None:
    for name in ("rope", "rope_qkv"):
        for label, given in calls(name, dtype).items():
            cos, x = given["cos"], given["x" if name == "rope" else "fused"]
            assert cos.dtype == given["sin"].dtype == (F64 if dtype is F64 else F32)
            assert given["interleaved"] == ("interleaved" in label)
            assert (given["sin"][..., -1] >= 0).all()  # of the lowest frequency: no position is < 0
            parts = 4 if "partial" in label or "repeated" in label else 2
            assert cos.shape[2] == x.shape[-1] // parts
            if cos.shape[1] > 1:  # samples have positions of their own
                assert not torch.equal(cos[:, 0], cos[:, 1])
            assert (cos.shape[1] == 1) == (label == "halves")
            if name == "rope_qkv":
                assert given["repeat"] == (x.shape[2] == 1) == ("repeated" in label)
                assert (x.shape[3] == 3) == (label == "one head for a group")


def test_calls_of_attention() -> None:
    found = calls("attention")
    for label, given in found.items():
        q, k, mask = given["q"], given["k"], given["mask"]
        heads, groups = q.shape[2], k.shape[2]
        assert heads % groups == 0 and ("grouped" in label) <= (groups < heads)
        assert mask.causal == ("full" not in label)
        assert (mask.window is not None) == ("window" in label)
        assert (mask.prefix is not None) == (label == "prefix")
        assert (mask.document_ids is not None) == (label == "documents")
        assert (given["dropout"] is not None) == ("dropout" in label)
        # A cache may have unused room; other queries are the last tokens.
        cached = label in ("cache", "decode")
        assert (given["query_offset"] > 0) == (len(q) < len(k)) == cached
        assert given["query_offset"] + len(q) <= len(k) or not mask.causal
    assert len(found["decode"]["q"]) == 1 and found["causal, grouped"]["k"].shape[2] == 2
    ids = found["documents"]["mask"].document_ids
    assert (ids[0] >= 0).all() and (ids[1] < 0).any()  # the second sequence ends before padding
    many = calls("attention", size="many")
    assert len(many["full"]["q"]) > 2000 > 500 > len(many["full"]["k"])
    assert len(many["causal"]["q"]) == len(many["causal"]["k"]) < 500
    for label in ("cache", "decode"):  # in other sizes all queries and keys are of one length
        given = calls("attention", size="large")[label]
        assert len(given["q"]) == len(given["k"]) and given["query_offset"] == 0


@pytest.mark.parametrize("dtype", [BF16, F64], ids=str)
def test_calls_of_blocks_of_a_ring(dtype: torch.dtype) -> None:
    for label, given in calls("attention_forward", dtype).items():
        q, k, mask = given["q"], given["k"], given["mask"]
        allowed = mask.allowed(len(q), len(k))
        if "of one token range" in label:
            assert torch.equal(allowed[0], torch.ones_like(allowed[0]).tril()) and mask.ascending
        elif "documents" in label:
            rows = allowed.any(-1)
            assert not allowed.all() and rows.any() and not rows[1].all()
        else:
            assert allowed.all()  # all keys are earlier
        assert (mask.document_ids is not None) == ("documents" in label)
        assert (given["dropout"] is not None) == ("dropout" in label)
        assert (given["v"].shape[-1] < q.shape[-1]) == (label == "narrow values")
        assert ("grouped" in label) <= (k.shape[2] < q.shape[2])
    assert calls("attention_forward").keys() == calls("attention_backward").keys()
    for given in calls("attention_backward", dtype).values():
        assert given["out"].dtype == dtype and given["lse"].dtype == (F64 if dtype is F64 else F32)
        names = ("q", "k", "v", "mask", "scores", "query_offset", "dropout")
        _, own = attention_forward(*(given[name] for name in names), backend="reference")
        assert (given["lse"] > own).all()  # keys of another block are counted too
        assert not any(given[name].requires_grad for name in ("dout", "q", "k", "v"))


def test_calls_of_paged_attention() -> None:
    for label, given in calls("paged_attention").items():
        pages, q, k = given["pages"], given["q"], given["k"]
        assert isinstance(pages, Pages) and pages.lengths.tolist() == [13, 0, 8]
        assert (pages.runs is not None) == ("in order" in label)
        in_order = [row == sorted(row) for row in pages.tables.tolist()]
        assert all(in_order) == ("in order" in label)
        assert int(pages.tables.max()) < len(k)
        assert len(pages.tables.unique()) == pages.tables.numel() or "in order" in label
        assert (given["window"] is not None) == ("window" in label)
        assert (given["scores"].softcap > 0) == (label == "soft-cap")
        assert (given["v"].shape[-1] < q.shape[-1]) == (label == "narrow values")
        assert (len(q) == 1) == (label not in ("several new tokens, grouped", "window"))
        assert ("grouped" in label) <= (k.shape[2] < q.shape[2])


def test_calls_of_scans_and_convolutions() -> None:
    for name in ("causal_conv", "gated_delta_rule", "ssd_scan"):
        for label, given in calls(name).items():
            assert (given["document_ids"] is not None) == ("documents" in label)
            state = given["initial_state" if name == "gated_delta_rule" else "state"]
            assert (state is not None) == ("state" in label)
            if given["document_ids"] is not None:
                first, second = given["document_ids"]
                assert len(first.unique()) == 3 and (first >= 0).all() and (second < 0).any()
            if name == "ssd_scan":
                assert (given["a"] < 0).all() and given["a"].requires_grad  # states decay
                assert (given["chunk_size"] >= len(given["x"])) == ("one chunk" in label)
            if name == "gated_delta_rule":
                decay, rate = (given[each] for each in ("log_decay", "beta"))
                assert (decay <= 0).all() and ((rate > 0) & (rate < 1)).all()
                assert decay.requires_grad and rate.requires_grad and given["l2_norm"] is True


def test_calls_of_low_precision() -> None:
    for label, given in calls("quantize_tensor").items():
        assert (given["scale"] is not None) == (label == "given scale")
        assert given["x"].dim() == (3 if label == "e5m2" else 2)
        assert given["rows"] and given["columns"] and given["measures"]
        if given["scale"] is not None:  # the numbers of E4M3 are used
            assert 448 / 2 < float(given["x"].abs().max() / given["scale"]) < 448 * 2
    for label, given in calls("quantized_matmul").items():
        assert (given["a"].shape[1] % 16 == 0) == ("multiples of 16" in label)
    for name in ("quantized_grouped_matmul", "quantized_grouped_gradient"):
        for given in calls(name).values():
            rows = len(given["x"])
            assert 0 < int(given["counts"].sum()) < rows and 0 in given["counts"]
        for size in ("empty", "one"):
            for given in calls(name, size=size).values():
                assert given["counts"].sum() <= len(given["x"])


def test_masks_of_calls_are_rules_that_kernels_know() -> None:
    for name in ("attention", "attention_forward"):
        for given in calls(name).values():
            mask = given["mask"]
            assert isinstance(mask, Mask) and mask.dense is None and mask.has_rules
