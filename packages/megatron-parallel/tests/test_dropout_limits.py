"""Dropout at its limits: the smallest hash that is kept, sites, shapes, and code for a compiler."""

from typing import Any

import pytest
import torch
from megatron_parallel import DropoutKey, LayoutError, _compat, keyed_dropout, keyed_uniform
from megatron_parallel.dropout import DropoutFusion, dropout, keep_mask
from megatron_parallel.dropout.hash import bits
from megatron_parallel.dropout.key import DropoutSite

SITE: dict[str, Any] = {"layer": 3, "site": 2}
WORD = 2**32
OTHER_BITS = f"torch {torch.__version__} compiles it to other bits"


def key_of(samples: int = 2, positions: int = 5) -> DropoutKey:
    return DropoutKey.for_batch(
        seed=7, iteration=4, samples=torch.arange(samples), positions=positions
    )


def noise(shape: tuple[int, ...], **more: Any) -> torch.Tensor:
    return keyed_uniform(shape, key_of(), dtype=torch.float64, **{**SITE, **more})


def test_an_element_is_kept_if_its_noise_is_at_least_the_probability() -> None:
    u = noise((5, 2, 64), channels=9)
    whole = u * WORD
    assert torch.equal(whole, whole.round()) and u.min() >= 0 and u.max() < 1
    assert u.min() < 0.02 and u.max() > 0.98
    for p in (0.25, 0.5, 0.875):
        assert torch.equal(keep_mask((5, 2, 64), p, key_of(), **SITE, channels=9), u >= p)
    p = u[3, 1, 5].item()
    for shift, kept in ((0, True), (1, False)):
        mask = keep_mask((5, 2, 64), p + shift / WORD, key_of(), **SITE, channels=9)
        assert mask[3, 1, 5] == kept
    single = keyed_uniform((5, 2, 64), key_of(), dtype=torch.float32, **SITE, channels=9)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), u, rtol=0, atol=2**-23)


def test_the_layer_may_be_a_tensor() -> None:
    tensor: dict[str, Any] = {"layer": torch.tensor(3), "site": 2}
    x = torch.arange(1.0, 81.0).view(5, 2, 8)
    assert torch.equal(
        keyed_dropout(x, 0.5, key_of(), **tensor), keyed_dropout(x, 0.5, key_of(), **SITE)
    )
    assert torch.equal(noise((5, 2, 8), layer=torch.tensor(3)), noise((5, 2, 8)))
    key, numbers = key_of().of_site(0.5, **tensor)
    other, of_other = key_of().of_site(0.5, layer=torch.tensor(4), site=2)
    assert numbers == of_other == (0, 0, 0, 2.0)  # the key contains the layer
    assert not torch.equal(key.word0, other.word0)


def test_numbers_of_a_site_are_those_that_a_kernel_needs() -> None:
    first, second, least, scale = DropoutKey.site_numbers(0.75, **SITE)
    assert (least, scale) == (2**30, 4.0)
    key, numbers = key_of().of_site(0.75, **SITE)
    assert numbers == (first, second, least, scale) and torch.equal(key.word0, key_of().word0)
    channels = torch.arange(16, dtype=torch.int32)
    hashed = bits(channels, (key.word0 + first)[..., None], (key.word1 ^ second)[..., None])
    assert torch.equal(hashed >= least, keep_mask((5, 2, 16), 0.75, key, **SITE))


@pytest.mark.parametrize("channels", [11, torch.tensor([4, 0, 7, 2, 9, 1])], ids=["first", "all"])
def test_a_gradient_has_the_mask_of_the_channels(channels: int | torch.Tensor) -> None:
    x = torch.ones(5, 2, 6, dtype=torch.float64, requires_grad=True)
    keyed_dropout(x, 0.5, key_of(), **SITE, channels=channels).sum().backward()
    mask = keep_mask((5, 2, 6), 0.5, key_of(), **SITE, channels=channels)
    assert x.grad is not None and torch.equal(x.grad, 2.0 * mask) and 0 < mask.sum() < 60


@pytest.mark.parametrize("shape", [(0, 2, 3), (5, 0, 3), (5, 2, 0), (2, 1, 2**18 + 3)], ids=str)
def test_empty_tensors_and_long_rows_are_processed(shape: tuple[int, ...]) -> None:
    key = key_of(samples=shape[1], positions=shape[0])
    kept = keyed_dropout(torch.ones(shape), 0.5, key, **SITE)
    assert kept.shape == shape
    assert torch.equal(kept > 0, keep_mask(shape, 0.5, key, **SITE))


def test_masks_and_noise_need_a_key_of_their_shape() -> None:
    message = r"dropout of shape \(2, 5, 3\) with a key for \(5, 2\)"
    with pytest.raises(LayoutError, match=message):
        keep_mask((2, 5, 3), 0.5, key_of(), **SITE)
    with pytest.raises(LayoutError, match=message):
        noise((2, 5, 3))


def test_keys_of_ranges_and_of_tokens_of_each_sample() -> None:
    whole = keep_mask((5, 2, 9), 0.5, key_of(), **SITE)
    assert torch.equal(keep_mask((2, 2, 9), 0.5, key_of().narrow(2, 4), **SITE), whole[2:4])
    indices = torch.tensor([[4, 0], [1, 3]])  # of both samples
    chosen = keep_mask((2, 2, 9), 0.5, key_of().select(indices), **SITE)
    assert torch.equal(chosen[:, 0], whole[[4, 0], 0])
    assert torch.equal(chosen[:, 1], whole[[1, 3], 1])


def test_code_for_a_compiler_drops_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs eagerly what a compiler would trace."""
    x = torch.arange(1.0, 81.0).view(5, 2, 8)
    expected = keyed_dropout(x, 0.25, key_of(), **SITE, channels=3)
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert torch.equal(keyed_dropout(x, 0.25, key_of(), **SITE, channels=3), expected)
    options: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda code, **more: options.append(more) or code)
    unchecked = getattr(dropout._scaled, "__wrapped__", dropout._scaled)  # by jaxtyping
    monkeypatch.setattr(dropout, "_scaled", unchecked)
    dropout._compiled.cache_clear()
    key, site = key_of(), DropoutSite.of(0.25, 3, 2)
    for _ in range(2):
        assert torch.equal(dropout._fused(x, key.word0, key.word1, 3, site), expected)
    assert options == [{"dynamic": True, "fullgraph": True}]  # compiled once
    dropout._compiled.cache_clear()


def test_dropout_is_fused_if_its_bits_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device without values, where the comparison is the test's."""
    monkeypatch.setattr(_compat, "why_not_compiled", lambda: None)
    monkeypatch.setattr(dropout, "_fused", dropout._eager)
    for equal, fused in ((True, DropoutFusion(True)), (False, DropoutFusion(False, OTHER_BITS))):
        monkeypatch.setattr(torch, "equal", lambda one, other, equal=equal: equal)
        assert dropout.dropout_fusion.__wrapped__(torch.device("meta")) == fused


def test_whether_dropout_is_fused_is_one_line() -> None:
    assert str(DropoutFusion(True)) == "dropout is one kernel" and DropoutFusion(True).reason == ""
    assert str(DropoutFusion(False, "no")) == "dropout is not fused: no"
