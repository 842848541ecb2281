"""What each rank computes of its part of a sequence, without the sums over ranks."""

from typing import Any

import pytest
import torch
from megatron_kernels import Mask
from megatron_models import GPT, GPTConfig, MambaModelConfig, Placement
from megatron_models.components.attention.context_parallel import ContextParallel
from megatron_models.components.context import Context
from megatron_models.components.embedding.output import select_tokens
from megatron_models.components.heads.module import SequenceHead
from megatron_models.components.mamba.module import _own_part
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.context_parallel import ContextSplit

F64 = torch.float64
SIZES: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 8,
    "vocab_size": 61,
    "max_position_embeddings": 16,
}
IDS = torch.tensor([[0] * 8, [0] * 5 + [-1] * 3])


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_ranks_have_their_tokens_among_the_selected_ones(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum over ranks, which the scattering computes, has zeros up to a multiple of 2 tokens."""
    monkeypatch.setattr(f"{select_tokens.__module__}.scatter_sequence", lambda x, axis: x)
    x = torch.randn(8, 2, 3, dtype=F64)
    indices = torch.tensor([[7, 0, 3, 4], [5, 5, 2, 1]])[:, :count]
    total = torch.zeros(count + count % 2, 2, 3, dtype=F64)
    for rank in range(2):
        axis = Mesh(ParallelLayout(tp=2, dp=1), rank).axis("tp")
        total += select_tokens(x.chunk(2)[rank], indices, axis)
    assert torch.equal(total[:count], select_tokens(x, indices))
    assert torch.equal(total[:count, 1], x[indices[1], 1]) and not total[count:].any()


def across(mesh: Mesh, length: int) -> ContextParallel:
    """Returns attention over the context-parallel ranks of a mesh."""
    axis = mesh.axis("cp")
    split = ContextSplit.zigzag(length, axis.size, torch.device("cpu"))
    return ContextParallel(mesh, axis, ["p2p"], split, Mask(document_ids=IDS), None)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2}], ids=str)
@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
def test_pooled_parts_add_up_to_the_pooled_sequence(sizes: dict[str, int], pooling: str) -> None:
    """Collectives of an imagined mesh return what this rank has."""
    head = GPTConfig(**SIZES, num_attention_heads=2, task_head="embedding", head_pooling=pooling)
    (spec,) = head.heads().values()
    x, total = torch.randn(8, 2, 8, dtype=F64), torch.zeros(2, 8, dtype=F64)
    layout, mask = ParallelLayout(dp=1, **sizes), Mask(document_ids=IDS)
    for rank in range(layout.tp * layout.cp):
        mesh = Mesh.imagined(layout, rank)
        placement = Placement(mesh, F64, sequence_parallel=layout.tp > 1)
        parallel = across(mesh, 8) if layout.cp > 1 else None
        part = x if parallel is None else x[parallel.split.indices[mesh.axis("cp").index][0]]
        part = part.chunk(layout.tp)[mesh.axis("tp").index]
        context = Context(mask, context_parallel=parallel)
        total += SequenceHead(spec, placement).pool(part, mask, context)
        mesh.close()
    expected = {
        "first": x[0],
        "last": torch.stack([x[7, 0], x[4, 1]]),
        "mean": torch.stack([x[:, 0].mean(0), x[:5, 1].mean(0)]),
    }[pooling]
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("cut", "length"), [(None, 4), (True, 4), (False, 8)])
def test_a_head_reads_the_part_of_a_pass_that_is_cut(cut: bool | None, length: int) -> None:
    config = GPTConfig(**SIZES, num_attention_heads=2, task_head="reward")
    (spec,) = config.heads().values()
    x, mask = torch.randn(length, 2, 8, dtype=F64), Mask(document_ids=IDS)
    mesh = Mesh.imagined(ParallelLayout(tp=2, dp=1), 1)  # of the parts the second one
    head = SequenceHead(spec, Placement(mesh, F64, sequence_parallel=True))
    found = head.pool(x, mask, Context(mask, sequence_parallel=cut))
    mesh.close()
    assert torch.equal(found, torch.stack([x[-1, 0], x[length - 4, 1]]))


def test_a_depth_of_prediction_keeps_the_part_of_its_rank() -> None:
    config = GPTConfig(**SIZES, num_attention_heads=2, mtp_num_layers=1)
    mesh = Mesh.imagined(ParallelLayout(tp=2, dp=1), 1)
    for cut, length in ((True, 4), (False, 8)):
        model = GPT(config, Placement(mesh, F64, sequence_parallel=cut))
        x = torch.randn(length, 2, 8, dtype=F64)
        assert model.mtp[0](x, x, Context(Mask())).shape == x.shape
    mesh.close()


def test_a_context_parallel_rank_has_the_weights_of_its_groups_of_a_recurrent_layer() -> None:
    config = MambaModelConfig(**SIZES, mamba_num_groups=4, mamba_head_dim=2, mamba_state_dim=3)
    rows = torch.arange(config.mamba_num_heads)
    assert len(rows) == 8  # two heads in each group
    for rank, own in enumerate(([0, 1, 2, 3], [4, 5, 6, 7])):
        mesh = Mesh(ParallelLayout(cp=2, dp=1), rank)
        context = Context(Mask(), context_parallel=across(mesh, 8))
        assert _own_part(context, 2, rows, 2).tolist() == own
        assert _own_part(context, 2, rows[:4]).tolist() == [2 * rank, 2 * rank + 1]
    assert _own_part(Context(Mask()), 2, rows, 2) is rows
