"""GPT with context parallelism equals one rank in float64: communication, splits and masks."""

import zlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from megatron_kernels import Mask
from megatron_models import GPT, ConfigError, Dropout, GPTConfig, Placement, StaticKVCache
from megatron_parallel import (
    DropoutKey,
    GradientBuffers,
    LayoutError,
    Mesh,
    ParallelLayout,
    collect_shardings,
    parameter_views,
)
from megatron_parallel.context_parallel import ContextSplit

LENGTH, BATCH, VOCAB = 16, 2, 150
TOLERANCE = 1e-12
SHAPE = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": LENGTH,
    "ffn_hidden_size": 24,
}
CONFIGS = {
    "learned": GPTConfig(**SHAPE),
    "rope": GPTConfig(
        **SHAPE,
        position_embedding_type="rope",
        normalization="RMSNorm",
        qk_layernorm=True,
        qk_layernorm_scope="projection",  # over the heads of all tensor-parallel ranks
        activation="swiglu",
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
    ),
}
IDS = torch.tensor([[0] * 3 + [1] * 8 + [2] * 4 + [-1], [0] * 11 + [1] * 5], dtype=torch.int32)
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "documents": {"document_ids": IDS},
    "full": {"causal": False, "document_ids": IDS},
    "window": {"window": 3},
    "reset": {
        "document_ids": IDS,
        "positions": torch.tensor([[*range(3), *range(8), *range(5)], [*range(11), *range(5)]]),
    },
}


@dataclass(frozen=True)
class Case:
    """The communication of attention, its mask and dropout, and the split of the sequence."""

    comm: str | tuple[str, ...]
    mask: str = "documents"
    config: str = "rope"
    rates: tuple[float, float] = (0.2, 0.3)
    per_document: bool = False
    sequence_parallel: bool = False
    layout: ParallelLayout = field(default_factory=lambda: ParallelLayout(dp=1))


RANKS_2 = ParallelLayout(cp=2, dp=1)
RANKS_4 = ParallelLayout(cp=4, dp=1, hierarchical_cp=(2, 2))
TENSOR = ParallelLayout(tp=2, cp=2, dp=1)
COMM_TYPES = ("p2p", "a2a", "allgather")
CASES = [
    *(Case(comm, mask, layout=RANKS_2) for comm in COMM_TYPES for mask in MASKS),
    *(Case(comm, config="learned", per_document=True, layout=RANKS_2) for comm in COMM_TYPES),
    Case(COMM_TYPES, layout=RANKS_2),
    *(Case(comm, config="learned", layout=RANKS_4) for comm in (*COMM_TYPES, "a2a+p2p")),
    *(Case(comm, "causal", rates=(0.0, 0.0), layout=RANKS_4) for comm in (*COMM_TYPES, "a2a+p2p")),
    *(Case(comm, per_document=True, layout=RANKS_4) for comm in ("p2p", "a2a+p2p")),
    *(Case(comm, sequence_parallel=True, layout=TENSOR) for comm in COMM_TYPES),
    Case("p2p", "reset", "learned", per_document=True, layout=TENSOR),
]


def step(mesh: Mesh, case: Case) -> tuple[torch.Tensor, dict[str, list[Any]], list[list[int]]]:
    """Returns losses of this rank's tokens, shards of gradients, and positions of the tokens."""
    model = GPT(
        CONFIGS[case.config],
        Placement(
            mesh,
            dtype=torch.float64,
            sequence_parallel=case.sequence_parallel,
            cp_comm_type=case.comm,
        ),
    )
    table = collect_shardings(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(table[name].shape, generator=generator, dtype=torch.float64) * 0.2
            for piece in table[name].shard_boxes(mesh):
                parameter[piece.local.slices] += noise[piece.box.slices]
    axis = mesh.axis("cp")
    split = ContextSplit.zigzag(LENGTH, axis.size)
    if case.per_document:
        split = ContextSplit.per_document(IDS, axis.size)
    text = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    key = DropoutKey.for_batch(seed=5, iteration=3, samples=torch.arange(BATCH), positions=LENGTH)
    buffers = GradientBuffers(model.named_parameters(), table, mesh)
    buffers.begin(last=True)
    losses = model.loss(
        split.take(text[:, :-1], axis.index),
        split.take(text[:, 1:], axis.index),
        mask=Mask(**MASKS[case.mask]),
        dropout=Dropout(key, *case.rates),
        split=split if case.per_document else None,
    )
    weights = split.take(torch.arange(BATCH * LENGTH).view(BATCH, -1) % 5, axis.index)
    (losses * weights).sum().backward()
    buffers.finish()
    views = parameter_views(buffers.gradients(), table, mesh)
    pieces = {name: [(v.offsets, v.tensor.clone()) for v in views[name]] for name in views}
    return losses.detach(), pieces, split.indices[axis.index].expand(BATCH, -1).tolist()


def steps(mesh: Mesh, cases: list[Case]) -> list[Any]:
    return [step(mesh, case) for case in cases]


def difference(one: Any, ranks: list[Any]) -> float:
    """Returns the largest absolute difference of losses or relative difference of gradients."""
    losses, whole, _ = one
    worst = 0.0
    for actual, pieces, positions in ranks:
        expected = losses.gather(1, torch.tensor(positions))
        worst = max(worst, float((actual - expected).abs().max()))
        for name, parts in pieces.items():
            ((_, full),) = whole[name]
            for offsets, gradient in parts:
                box = tuple(slice(o, o + n) for o, n in zip(offsets, gradient.shape, strict=True))
                relative = (gradient - full[box]).abs().max() / full.abs().max()
                worst = max(worst, float(relative))
    return worst


@pytest.mark.parametrize("layout", [RANKS_2, RANKS_4, TENSOR], ids=["cp2", "cp4", "tp2-cp2"])
def test_losses_and_gradients_equal_one_rank(worker_pool, layout):
    cases = [case for case in CASES if case.layout == layout]
    ranks = worker_pool.run_mesh(layout, steps, cases)
    known = {}
    for number, case in enumerate(cases):
        same = (case.config, case.mask, case.rates)
        if same not in known:
            known[same] = step(Mesh.single(), Case("p2p", case.mask, case.config, case.rates))
        worst = difference(known[same], [rank[number] for rank in ranks])
        assert worst < TOLERANCE, case


def test_unsupported_options_are_refused_in_one_line():
    config = CONFIGS["rope"]
    eight = Mesh(ParallelLayout(tp=2, cp=8, dp=1), 0)
    with pytest.raises(LayoutError, match=r"4 heads on each tensor-parallel rank .* over 8"):
        GPT(config, Placement(eight, device="meta", cp_comm_type="a2a"))
    with pytest.raises(ConfigError, match=r"'a2a\+p2p' needs the layout's hierarchical_cp"):
        GPT(config, Placement(eight, device="meta", cp_comm_type="a2a+p2p"))
    with pytest.raises(ConfigError, match="cp_comm_type 'ring' is not known; use one of p2p"):
        GPT(config, Placement(eight, device="meta", cp_comm_type="ring"))
    with pytest.raises(ConfigError, match="2 values of cp_comm_type for 3 layers"):
        GPT(config, Placement(eight, device="meta", cp_comm_type=("p2p", "a2a")))
    model = GPT(config, Mesh(RANKS_2, 0))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(LayoutError, match=r"14 tokens .* 2 x 2 equal slices"):
        model(tokens[:, :7])
    with pytest.raises(LayoutError, match=r"18 tokens .* 2 x 2 equal slices"):
        model.stage_output_spec(1, 18)
    with pytest.raises(ConfigError, match=r"8 tokens .* of 2 .* a split into 4 parts of 4"):
        model(tokens, split=ContextSplit.zigzag(16, 4))
    with pytest.raises(ConfigError, match="decoding cuts no sequence"):
        split, cache = ContextSplit.zigzag(16, 2), StaticKVCache(config, Mesh.single(), 1, 16)
        model(tokens, split=split, cache=cache)
    with pytest.raises(ConfigError, match="as plain rules, without dense"):
        model(tokens, mask=Mask(positions=torch.arange(16)[None]).prepare(16, 16))
