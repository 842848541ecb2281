"""Multi-token prediction equals that of megatron-core, which runs here on a CPU in one process."""

from types import SimpleNamespace

import pytest
import torch
from megatron_models import GPT, FutureTokens, GPTConfig, Placement, shift_within_documents
from megatron_names import name_in_megatron
from megatron_parallel import AuxiliaryLosses, Mesh
from torch import Tensor

LENGTH, VOCABULARY, HIDDEN = 12, 50, 16
CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=HIDDEN,
    num_attention_heads=2,
    vocab_size=VOCABULARY,
    make_vocab_size_divisible_by=1,
    max_position_embeddings=LENGTH,
    untie_embeddings_and_output_weights=True,
    mtp_num_layers=2,
    mtp_loss_scaling_factor=0.6,
)


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator)
    mask = (torch.rand(2, LENGTH, generator=generator) < 0.7).float()
    return text[:, :-1], text[:, 1:], mask


def test_losses_and_every_gradient_equal_megatrons(megatron: SimpleNamespace) -> None:
    """Compares in float32, in which their vocabulary loss always computes."""
    settings = megatron.config.TransformerConfig(
        num_layers=CONFIG.num_layers,
        hidden_size=HIDDEN,
        num_attention_heads=CONFIG.num_attention_heads,
        mtp_num_layers=CONFIG.mtp_num_layers,
        mtp_loss_scaling_factor=CONFIG.mtp_loss_scaling_factor,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    spec = megatron.specs.get_gpt_layer_local_spec()
    theirs = megatron.model.GPTModel(
        settings,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        mtp_block_spec=megatron.specs.get_gpt_mtp_block_spec(settings, spec, False),
    )
    ours = GPT(CONFIG, Placement(Mesh.single()))
    found = {  # megatron-core 0.19 has renamed the layer
        name.replace("mtp_model_layer", "transformer_layer"): each
        for name, each in theirs.named_parameters()
    }
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            noise = 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise + ("norm.weight" in name))
            other = found[name_in_megatron(name)]
            other.copy_(parameter.view(other.shape))
    tokens, labels, mask = drawn()
    positions = torch.arange(LENGTH).expand(2, -1)
    blocked = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    megatron.mtp.MTPLossLoggingHelper.tracker.clear()
    expected = theirs(tokens, positions, blocked, labels=labels, loss_mask=mask)
    ((expected * mask).sum() / mask.sum()).backward()

    values = (tokens, labels, mask, positions)
    future = FutureTokens(*(shift_within_documents(value, 2) for value in values))
    counts = future.loss_mask.sum((0, 1)).tolist()
    names = CONFIG.multi_token_losses
    losses = AuxiliaryLosses(dict(zip(names, counts, strict=True)))
    loss = ours(tokens, labels=labels, auxiliary_losses=losses, future=future)
    ((loss * mask).sum() / mask.sum()).backward()

    torch.testing.assert_close(loss, expected, rtol=0, atol=2e-5)
    tracker = megatron.mtp.MTPLossLoggingHelper.tracker
    reported = tracker["values" if "values" in tracker else "loss_values"]  # of 0.19
    for name, count, value in zip(names, counts, reported, strict=True):
        mean = torch.as_tensor(losses.sums[name]) / count
        torch.testing.assert_close(mean.float(), value, rtol=0, atol=1e-5)
    assert {name_in_megatron(name) for name, _ in ours.named_parameters()} == set(found)
    for name, parameter in ours.named_parameters():
        other = found[name_in_megatron(name)].grad
        assert other is not None and parameter.grad is not None and other.abs().max() > 1e-4
        own = parameter.grad.view(other.shape)
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5, msg=name)


def test_values_shift_inside_packed_documents_like_megatrons(megatron: SimpleNamespace) -> None:
    packed = pytest.importorskip("megatron.core.packed_seq_params")
    bounds = torch.tensor([0, 4, 5, 12], dtype=torch.int32)
    ids = torch.repeat_interleave(torch.tensor([7, 3, 7]), bounds.diff())[None]
    parameters = packed.PackedSeqParams(cu_seqlens_q=bounds)
    tokens = drawn()[0][:1] + 1
    ours = shift_within_documents(tokens, 3, ids)
    theirs = tokens
    for depth in range(3):
        theirs, _ = megatron.mtp.roll_tensor(theirs, packed_seq_params=parameters)
        assert torch.equal(ours[..., depth], theirs)
    assert (ours == 0).sum() == (1 + 1 + 1) + (2 + 1 + 2) + (3 + 1 + 3)
