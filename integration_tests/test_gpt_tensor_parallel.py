"""GPT with tensor parallelism equals one rank in float64."""

import pytest
import torch
from megatron_models import GPT, GPTConfig, Placement, StaticKVCache
from megatron_parallel import LayoutError, Mesh, ParallelLayout, collect_shardings, parameter_views

SMALL = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 150,  # two ranks hold 128 rows each; the second has 22 rows of the vocabulary
    "max_position_embeddings": 16,
}
GPT2 = GPTConfig(**SMALL, num_query_groups=1)  # which two ranks share
LLAMA = GPTConfig(
    **SMALL,
    num_query_groups=2,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)


def loss_and_gradients(mesh, config, tokens, labels):
    """Returns the loss of each token, and gradient shards as (name, offsets, values)."""
    torch.manual_seed(3)
    model = GPT(config, Placement(mesh, dtype=torch.float64))
    table = collect_shardings(model)
    with torch.no_grad():  # biases that are not 0 and gains that are not 1, equal on all ranks
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and table[name].dim is None:
                parameter.add_(torch.randn(parameter.shape, dtype=torch.float64) * 0.1)
    device = mesh.device
    loss = model.loss(tokens.to(device), labels.to(device))
    loss.mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    views = parameter_views(gradients, table, mesh)
    pieces = [(name, view.offsets, view.tensor.cpu()) for name in views for view in views[name]]
    return loss.detach().cpu(), pieces


def decoded_logits(mesh, config, tokens):
    model = GPT(config, Placement(mesh, dtype=torch.float64))
    cache = StaticKVCache(config, mesh, len(tokens), 16, dtype=torch.float64)
    tokens = tokens.to(mesh.device)
    with torch.no_grad():
        parts = [model(tokens[:, :4], cache=cache), model(tokens[:, 4:], cache=cache)]
    return torch.cat(parts).cpu()


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(150, (2, 13), generator=generator)
    return text[:, :-1], text[:, 1:]


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_loss_and_gradients_on_two_ranks_equal_one(rank_pool, config, batch):
    one, pieces = loss_and_gradients(Mesh.single(), config, *batch)
    whole = {name: values for name, _, values in pieces}
    layout = ParallelLayout(tp=2, dp=1)
    for loss, parts in rank_pool.run_mesh(layout, loss_and_gradients, config, *batch):
        torch.testing.assert_close(loss, one, rtol=0, atol=1e-12)
        for name, offsets, values in parts:
            box = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
            torch.testing.assert_close(values, whole[name][box], rtol=0, atol=1e-13, msg=name)


def test_logits_with_a_cache_on_two_ranks_equal_one(rank_pool, batch):
    tokens, _ = batch
    one = decoded_logits(Mesh.single(), LLAMA, tokens)
    parts = rank_pool.run_mesh(ParallelLayout(tp=2, dp=1), decoded_logits, LLAMA, tokens)
    two = torch.cat(parts, -1)
    torch.testing.assert_close(two, one, rtol=0, atol=1e-12)
    assert (two[..., 150:] == -torch.inf).all()


def some_logits(mesh, config, tokens, places, cut):
    """Returns logits at some positions, and the number of elements of the output layer's result."""
    model = GPT(config, Placement(mesh, dtype=torch.float64, sequence_parallel=cut))
    made = []
    model.output.register_forward_hook(lambda module, given, result: made.append(result.numel()))
    with torch.no_grad():
        found = model(tokens.to(mesh.device), logits_at=places.to(mesh.device))
    return found.cpu(), made


@pytest.mark.parametrize("cut", [False, True], ids=["tp2", "tp2-sp"])
def test_logits_at_positions_on_two_ranks_equal_one(rank_pool, batch, cut):
    tokens, _ = batch
    places = torch.tensor([[11, 0, 6], [5, 5, 7]])
    whole, _ = some_logits(Mesh.single(), LLAMA, tokens, places, False)
    results = rank_pool.run_mesh(
        ParallelLayout(tp=2, dp=1), some_logits, LLAMA, tokens, places, cut
    )
    two = torch.cat([found for found, _ in results], -1)
    torch.testing.assert_close(two, whole, rtol=0, atol=1e-12)
    made = 4 if cut else 3  # both ranks have the same number of positions
    assert [count for _, count in results] == [[made * 2 * 128]] * 2


@pytest.mark.parametrize(
    ("tp", "message"),
    [
        (3, r"3 ranks of axis 'tp' cannot share the 2 entries"),
        (8, r"4 of 8 tensor-parallel ranks share a query group and cannot share its 2 heads"),
    ],
)
def test_groups_and_heads_that_do_not_divide_over_the_ranks_are_refused(tp, message):
    mesh = Mesh(ParallelLayout(tp=tp).resolve(tp), 0)
    with pytest.raises(LayoutError, match=message):
        GPT(LLAMA, mesh)
