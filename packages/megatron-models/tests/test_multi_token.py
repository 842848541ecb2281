"""Multi-token prediction on one rank: straight-line code in float64, documents, counts."""

import dataclasses

import pytest
import torch
from megatron_kernels import Mask
from megatron_models import (
    GPT,
    ConfigError,
    FutureTokens,
    Placement,
    StaticKVCache,
    parameter_count,
    parameter_shapes,
    shift_within_documents,
    training_flops,
)
from megatron_parallel import AuxiliaryLosses, Mesh, ParallelLayout, RecomputeConfig
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

DEPTHS = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.6}
IDS = torch.tensor([[4, 4, 4, 4, 7, 7, 7, 8, 8], [1, 1, 2, 2, 2, 2, 2, 2, -1]], dtype=torch.int32)
LOSS_MASK = torch.tensor(
    [[1, 1, 1, 0, 1, 1, 1, 0, 1], [1, 0, 1, 1, 1, 1, 0, 1, 0]], dtype=torch.float64
)
LABELS = [13.0, 9.0, 5.0]
"""Labels with a loss at depths 0, 1 and 2, counted by hand."""


def built(config, scramble, **options):
    return scramble(GPT(config, Placement(Mesh.single(), dtype=torch.float64, **options)))


def drawn(config):
    """Returns tokens, labels and loss mask of two rows of documents."""
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(1, config.vocab_size, (2, 10), generator=generator)
    return text[:, :-1], text[:, 1:], LOSS_MASK


def positions_of(ids):
    """Returns the position of each token in its document."""
    rows = [[row[:i].count(row[i]) for i in range(len(row))] for row in ids.tolist()]
    return torch.tensor(rows)


def future_of(tokens, labels, mask, depths=2):
    values = (tokens, labels, mask, positions_of(IDS))
    return FutureTokens(*(shift_within_documents(value, depths, IDS) for value in values))


def attend_within(ids):
    """Returns a causal mask ``[b, 1, s, s]`` inside documents."""
    length = ids.shape[1]
    same = ids[:, None, :, None] == ids[:, None, None, :]
    return same & torch.ones(length, length, dtype=torch.bool).tril()


def norm(x, weights, name):
    h = x.shape[-1]
    return functional.layer_norm(x, (h,), weights[f"{name}.weight"], weights[f"{name}.bias"])


def layer(x, weights, name, config):
    """Applies one layer of GPT-2 to ``[b, s, h]``."""
    b, s, h = x.shape
    n = config.num_attention_heads
    fused = norm(x, weights, f"{name}.attention_norm")
    fused = fused @ weights[f"{name}.attention.qkv.weight"].reshape(3 * h, h).T
    fused = fused + weights[f"{name}.attention.qkv.bias"].flatten()
    q, k, v = fused.view(b, s, n, 3, h // n).permute(3, 0, 2, 1, 4)
    y = functional.scaled_dot_product_attention(q, k, v, attn_mask=attend_within(IDS))
    y = y.transpose(1, 2).reshape(b, s, h)
    out = f"{name}.attention.out"
    x = x + y @ weights[f"{out}.weight"].T + weights[f"{out}.bias"]
    y = norm(x, weights, f"{name}.mlp_norm")
    y = y @ weights[f"{name}.mlp.up.weight"].T + weights[f"{name}.mlp.up.bias"]
    y = functional.gelu(y) @ weights[f"{name}.mlp.down.weight"].T
    return x + y + weights[f"{name}.mlp.down.bias"]


def straight_line_losses(weights, config, tokens, labels, mask):
    """Returns the sums of the losses of all depths, and their counts of labels."""
    ids, positions = IDS.tolist(), positions_of(IDS)
    word, position = weights["embedding.word.weight"], weights["embedding.position.weight"]
    output = weights.get("output.weight", word)[: config.vocab_size]
    h = word[tokens] + position[positions]
    for number in range(config.num_layers):
        h = layer(h, weights, f"layers.{number}", config)
    h = norm(h, weights, "final_norm")
    found = []
    for depth in range(config.mtp_num_layers + 1):
        if depth:
            name = f"mtp.{depth - 1}"
            rows = []
            for row in range(2):
                ahead = []
                for i in range(9):
                    j = i + depth
                    inside = j < 9 and ids[row][j] == ids[row][i]
                    token, place = (tokens[row, j], positions[row, j]) if inside else (0, 0)
                    ahead.append(word[token] + position[place])
                rows.append(torch.stack(ahead))
            both = (norm(torch.stack(rows), weights, f"{name}.enorm"),)
            both += (norm(h, weights, f"{name}.hnorm"),)
            h = torch.cat(both, -1) @ weights[f"{name}.eh_proj.weight"].T
            h = norm(layer(h, weights, f"{name}.layer", config), weights, f"{name}.final_norm")
        logs = (h @ output.T).log_softmax(-1)
        total, count = torch.zeros((), dtype=torch.float64), 0.0
        for row in range(2):
            for i in range(9):
                j = i + depth
                if j < 9 and ids[row][j] == ids[row][i]:
                    total = total - mask[row, j] * logs[row, i, labels[row, j]]
                    count += float(mask[row, j])
        found.append((total, count))
    return found


@pytest.mark.parametrize(
    "changes",
    [{}, {"untie_embeddings_and_output_weights": True}],
    ids=["tied", "untied"],
)
@pytest.mark.parametrize(
    "recompute",
    [
        RecomputeConfig(),
        RecomputeConfig(granularity="full", method="uniform", num_layers=1),
        RecomputeConfig(granularity="full", method="block", num_layers=1),
        RecomputeConfig(granularity="selective", modules=("core_attn", "mlp", "layernorm")),
    ],
    ids=["saved", "uniform", "block", "selective"],
)
def test_losses_and_every_gradient_equal_straight_line_code(small, scramble, changes, recompute):
    config = small(**DEPTHS, **changes)
    model = built(config, scramble, recompute=recompute)
    tokens, labels, mask = drawn(config)
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    wanted = straight_line_losses(weights, config, tokens, labels, mask)
    assert [count for _, count in wanted] == LABELS
    losses = AuxiliaryLosses({f"mtp_{k} loss": wanted[k][1] for k in (1, 2)})
    found = model(
        tokens,
        labels=labels,
        positions=positions_of(IDS),
        mask=Mask(document_ids=IDS),
        auxiliary_losses=losses,
        future=future_of(tokens, labels, mask),
    )
    ((found * mask).sum() / wanted[0][1]).backward()
    objective = sum(
        weight * total / count
        for weight, (total, count) in zip((1.0, 0.3, 0.3), wanted, strict=True)
    )
    objective.backward()
    torch.testing.assert_close((found * mask).sum(), wanted[0][0], rtol=0, atol=1e-10)
    for k in (1, 2):
        torch.testing.assert_close(losses.sums[f"mtp_{k} loss"], wanted[k][0], rtol=0, atol=1e-10)
    for name, parameter in model.named_parameters():
        expected = weights[name].grad
        assert expected.abs().max() > 1e-6, name
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=1e-11, msg=name)


def test_values_shift_inside_documents_only():
    values = torch.tensor([[10, 11, 12, 13, 14]])
    ids = torch.tensor([[5, 5, 5, 2, 2]])
    whole = [[[11, 12], [12, 13], [13, 14], [14, 0], [0, 0]]]
    inside = [[[11, 12], [12, 0], [0, 0], [14, 0], [0, 0]]]
    assert shift_within_documents(values, 2).tolist() == whole
    assert shift_within_documents(values, 2, ids).tolist() == inside
    assert shift_within_documents(values, 7)[0, 0].tolist() == [11, 12, 13, 14, 0, 0, 0]
    assert shift_within_documents(values, 7)[0, :, 5:].tolist() == [[0, 0]] * 5


def test_logits_and_decoding_do_not_run_the_further_layers(small, scramble):
    with_depths = built(small(**DEPTHS), scramble)
    without = GPT(small(), Placement(Mesh.single(), dtype=torch.float64))
    kept = {name: tensor for name, tensor in with_depths.state_dict().items() if "mtp" not in name}
    without.load_state_dict(kept)
    tokens, labels, _ = drawn(with_depths.config)
    runs = []
    for each in with_depths.mtp:
        each.register_forward_hook(lambda *_: runs.append(1))
    assert torch.equal(with_depths(tokens), without(tokens))
    assert torch.equal(with_depths(tokens, labels=labels), without(tokens, labels=labels))
    cache = StaticKVCache(with_depths.config, with_depths.mesh, 2, 9, dtype=torch.float64)
    parts = torch.cat([with_depths(part, cache=cache) for part in tokens.split(3, 1)])
    torch.testing.assert_close(parts, without(tokens), rtol=0, atol=1e-12)
    assert not runs


def test_names_shapes_and_counts_are_those_of_the_module(small, scramble):
    config = small(**DEPTHS)
    model = built(config, scramble)
    shapes = parameter_shapes(config)
    assert list(shapes) == [name for name, _ in model.named_parameters()]
    assert shapes["mtp.1.eh_proj.weight"] == (24, 48)
    plain = small()
    one = sum(p.numel() for n, p in model.named_parameters() if n.startswith("layers.1."))
    further = 2 * (one + 24 * 48 + 3 * 2 * 24)
    assert parameter_count(config) == parameter_count(plain) + further


def test_operations_are_those_that_torch_counts(small, scramble):
    """Megatron's count: each depth adds a layer, 2h² multiply-adds and the output layer."""
    config = small(**DEPTHS, make_vocab_size_divisible_by=1)
    layer_only = training_flops(small(num_layers=3), 9) - training_flops(small(), 9)
    output = 3 * 2 * 9 * 24 * config.padded_vocab_size
    further = 2 * (layer_only + 3 * 2 * 9 * 2 * 24 * 24 + output)
    plain = training_flops(small(make_vocab_size_divisible_by=1), 9)
    assert training_flops(config, 9) == plain + further
    model = built(config, scramble)
    tokens, labels, mask = (each[:1] for each in drawn(config))
    future = FutureTokens(*(shift_within_documents(t, 2) for t in (tokens, labels, mask, tokens)))
    future = future._replace(positions=future.positions % 9)
    # torch counts all query-key pairs of plain attention; which fused ones, depends on its version.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        losses = AuxiliaryLosses({"mtp_1 loss": 1.0, "mtp_2 loss": 1.0})
        given = {"auxiliary_losses": losses, "future": future}
        model(tokens, labels=labels, **given).sum().backward()
    each = config.multiply_adds
    assert counter.get_total_flops() == 3 * 2 * (9 * each.per_token + 9**2 * each.per_pair)


def test_reported_losses_of_routers_are_means_over_all_layers(small, scramble):
    experts = {"num_experts": 4, "moe_z_loss_coeff": 0.2, "moe_ffn_hidden_size": 20}
    config = small(**experts, **DEPTHS)
    model = built(config, scramble)
    tokens, labels, mask = drawn(config)
    names = ("z_loss", "mtp_1 loss", "mtp_2 loss")
    losses = AuxiliaryLosses(dict.fromkeys(names, 1.0))
    routers = [model.layers["0"], model.layers["1"], *(each.layer for each in model.mtp)]
    squares = []
    for block in routers:
        block.mlp.router.register_forward_hook(
            lambda module, args, routing: squares.append(
                routing.logits.logsumexp(-1).square().sum()
            )
        )
    future = future_of(tokens, labels, mask)
    model(tokens, labels=labels, auxiliary_losses=losses, future=future).sum().backward()
    assert len(squares) == 4
    torch.testing.assert_close(losses.sums["z_loss"], sum(squares) / 4, rtol=0, atol=1e-10)


def test_layers_of_depths_follow_those_of_the_model(small):
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 20, "moe_layer_freq": "[1,0,1]"}
    biased = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    config = small(**experts, **biased, num_layers=3, mtp_num_layers=2)
    assert list(config.numbered_mixers) == [0, 1, 2, 3, 4]
    assert list(config.counting_layers) == [0, 2, 3, 4]
    layers = ("layers.0", "layers.2", "mtp.0.layer", "mtp.1.layer")
    assert list(config.state()) == [f"{layer}.mlp.router.expert_bias" for layer in layers]
    assert config.multi_token_losses == ("mtp_1 loss", "mtp_2 loss") and config.depth == 3
    for pattern, count in (("[1,0,1]", 2 + 2), ("[1,1,0]", 2)):  # depths equal the last layer
        routers = dataclasses.replace(config, moe_layer_freq=pattern).mixers
        assert {m.layers_with_experts for m in routers if m.expert_parallel} == {count}


def test_ranks_that_do_not_divide_the_projection_are_refused(small):
    sizes = {"num_attention_heads": 5, "kv_channels": 4, "make_vocab_size_divisible_by": 160}
    small(**sizes).check_layout(ParallelLayout(tp=5, dp=1))
    with pytest.raises(ConfigError, match="tp 5 cannot cut the outputs of eh_proj, hidden_size 24"):
        small(**sizes, mtp_num_layers=1).check_layout(ParallelLayout(tp=5, dp=1))


def test_wrong_settings_are_refused(small, scramble):
    with pytest.raises(ConfigError, match=r"mtp_loss_scaling_factor.* has no effect without"):
        small(mtp_loss_scaling_factor=0.3)
    with pytest.raises(ConfigError, match="mtp_num_layers"):
        small(mtp_num_layers=-1)
    config = small(**DEPTHS)
    assert "mtp_num_layers" in config.unsupported_reason("compile").setting
    assert small().unsupported_reason("compile") is None
    model, (tokens, labels, mask) = built(config, scramble), drawn(config)
    future = future_of(tokens, labels, mask, depths=3)
    with pytest.raises(ConfigError, match="future tokens need auxiliary_losses"):
        model(tokens, labels=labels, future=future)
    with pytest.raises(ConfigError, match="have 3 depths, but mtp_num_layers is 2"):
        model(tokens, labels=labels, future=future, auxiliary_losses=AuxiliaryLosses({}))


def test_other_families_refuse_the_layers(small):
    from megatron_models.models.gpt.families.gpt2 import FAMILY

    config = small(activation="gelu_tanh", ffn_hidden_size=96, mtp_num_layers=1)
    assert FAMILY.differences(dataclasses.replace(config, mtp_num_layers=0)) == []
    assert any("mtp_num_layers" in text for text in FAMILY.differences(config))
