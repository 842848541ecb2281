"""GPT with tensor, sequence and pipeline parallelism equals one rank in float64.

The model is not symmetric: gains are not 1, biases are not 0, the vocabulary size is not divisible
by the number of ranks, stages are uneven, documents cross every boundary between ranks,
micro-batches have different numbers of unmasked tokens, and there is dropout.
"""

import zlib
from contextlib import ExitStack
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
from megatron_kernels import Mask
from megatron_models import GPT, ConfigError, Dropout, GPTConfig, Placement, gpt_chunks
from megatron_models.cache import StaticKVCache
from megatron_models.components.context import Context
from megatron_models.components.dropout import StageDropout
from megatron_models.components.embedding.module import EmbeddingTable
from megatron_parallel import (
    DropoutKey,
    GradientBuffers,
    LayoutError,
    Mesh,
    ParallelLayout,
    PipelineEngine,
    Sharding,
    collect_shardings,
    parameter_views,
)
from megatron_parallel.pipeline import stage_parameters

LENGTH, BATCH, MICRO_BATCHES, VOCAB = 12, 2, 4, 150
RATES = 0.2, 0.3
TOLERANCE = 1e-12

SHAPE = {
    "num_layers": 5,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "vocab_size": VOCAB,  # padded to 256 rows: of four ranks one holds 22 real rows, one none
    "max_position_embeddings": 16,
    "ffn_hidden_size": 24,
}
CONFIGS = {
    "tied": GPTConfig(**SHAPE),
    "untied": GPTConfig(
        **SHAPE,
        position_embedding_type="rope",
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=False,
        add_qkv_bias=True,
        untie_embeddings_and_output_weights=True,
    ),
}


@dataclass(frozen=True)
class Case:
    """A layout and the options of a model in it."""

    layout: ParallelLayout
    sequence_parallel: bool = False
    split: tuple[range, ...] | None = None
    schedule: str = "1f1b"


UNEVEN = (range(2), range(2, 5))
CASES = {
    "tp2": Case(ParallelLayout(tp=2, dp=1)),
    "tp2-sp": Case(ParallelLayout(tp=2, dp=1), True),
    "tp4-sp": Case(ParallelLayout(tp=4, dp=1), True),
    "pp2": Case(ParallelLayout(pp=2, dp=1), split=UNEVEN),
    "tp2-pp2": Case(ParallelLayout(tp=2, pp=2, dp=1), split=UNEVEN),
    "tp2-sp-pp2": Case(ParallelLayout(tp=2, pp=2, dp=1), True, UNEVEN),
    "tp2-sp-pp2-vpp2": Case(
        ParallelLayout(tp=2, pp=2, vpp=2, dp=1),
        True,
        (range(1), range(1, 2), range(2, 4), range(4, 5)),
        "interleaved-1f1b",
    ),
}


def make_batch(number):
    """Returns a micro-batch: documents of unequal lengths, padding, labels without loss."""
    generator = torch.Generator().manual_seed(number)
    text = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
    labels = text[:, 1:].clone()
    labels[0, : 2 * number + 1] = -100
    lengths = [(5, 4, 3), (2, 10, 0)][number % 2], (1, 6, 5)
    ids, places = [], []
    for row in lengths:
        ids.append([document for document, n in enumerate(row) for _ in range(n)])
        places.append([place for n in row for place in range(n)])
    ids = torch.tensor(ids, dtype=torch.int32)
    ids[1, -2:] = -1
    labels[1, -2:] = -100
    return {
        "tokens": text[:, :-1],
        "labels": labels,
        "positions": torch.tensor(places, dtype=torch.int32),
        "mask": Mask(document_ids=ids),
        "samples": torch.arange(BATCH) + BATCH * number + 2**33,
    }


def scramble(chunks, table, mesh):
    """Adds noise to every parameter, equal on every rank that holds it."""
    with torch.no_grad():
        for name, parameter in stage_parameters(chunks).items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(table[name].shape, generator=generator, dtype=torch.float64) * 0.2
            for piece in table[name].shard_boxes(mesh):
                parameter[piece.local.slices] += noise[piece.box.slices]


def step(mesh, config, case, hidden=RATES[0], attention=RATES[1], defect=None):
    """Returns losses ``{micro-batch: [b, s]}`` of the last stage, their sum, gradient shards."""
    with ExitStack() as stack:
        if defect is not None:
            stack.enter_context(patch.object(*DEFECTS[defect]()))
        chunks = gpt_chunks(
            config,
            Placement(mesh, sequence_parallel=case.sequence_parallel, dtype=torch.float64),
            split=case.split,
        )
        table = {}
        for chunk in chunks:
            table |= collect_shardings(chunk)
        scramble(chunks, table, mesh)
        losses = {}

        def inputs(batch, stage):
            key = DropoutKey.for_batch(
                seed=5, iteration=3, samples=batch["samples"], positions=LENGTH
            )
            names = ("labels", "positions", "mask")
            given = {name: batch[name] for name in names}
            given["dropout"] = Dropout(key, hidden, attention)
            return given | ({"x": batch["tokens"]} if stage == 0 else {})

        def loss(output, batch):
            losses[int(batch["samples"][0])] = output.detach()
            return {"loss": output.sum()}

        engine = PipelineEngine(
            mesh,
            chunks,
            loss,
            inputs=inputs,
            stage_output_spec=lambda batch, stage: chunks[0].stage_output_spec(
                *batch["tokens"].shape
            ),
            schedule=case.schedule,
        )
        buffers = GradientBuffers(stage_parameters(chunks), table, mesh)
        batches = [make_batch(number) for number in range(MICRO_BATCHES)]
        true_tokens = sum(int((batch["labels"] >= 0).sum()) for batch in batches)
        total = engine.run(batches, {"loss": true_tokens})["loss"]
        buffers.finish()
    views = parameter_views(buffers.gradients(), table, mesh)
    pieces = [(name, view.offsets, view.tensor.clone()) for name in views for view in views[name]]
    return losses, total, pieces


def largest_difference(one, ranks, stages):
    """Returns the largest difference of losses and gradients from one rank, and its name."""
    losses, total, pieces = one
    whole = {name: gradient for name, _, gradient in pieces}
    rms = torch.cat([g.flatten() for g in whole.values()]).square().mean().sqrt()
    worst, where, seen = 0.0, "", {name: torch.zeros_like(g) for name, g in whole.items()}
    with_losses = 0
    for their_losses, their_total, parts in ranks:
        with_losses += bool(their_losses)
        differences = [("sum of losses", (their_total - total).abs().max())]
        for number, loss in their_losses.items():
            differences.append((f"loss {number}", (loss - losses[number]).abs().max()))
        for name, offsets, gradient in parts:
            box = tuple(slice(o, o + n) for o, n in zip(offsets, gradient.shape, strict=True))
            seen[name][box] = 1
            scale = max(whole[name].abs().max(), 1e-3 * rms)
            differences.append((name, (gradient - whole[name][box]).abs().max() / scale))
        for name, difference in differences:
            if not difference <= worst:
                worst, where = float(difference), name
    assert with_losses == len(ranks) // stages
    missing = [name for name, covered in seen.items() if not covered.all()]
    assert not missing, f"no rank has the gradient of {missing}"
    return worst, where


@pytest.fixture(scope="module")
def one_rank():
    """Returns a function that returns the cached step of one rank for a configuration."""
    known = {}

    def run(name, *rates):
        if (name, rates) not in known:
            alone = Case(ParallelLayout(dp=1))
            known[name, rates] = step(Mesh.single(), CONFIGS[name], alone, *rates)
        return known[name, rates]

    return run


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_losses_and_gradients_with_dropout_equal_one_rank(worker_pool, one_rank, case, name):
    one = one_rank(name)
    ranks = worker_pool.run_mesh(case.layout, step, CONFIGS[name], case)
    worst, where = largest_difference(one, ranks, case.layout.pp)
    assert worst <= TOLERANCE, where


@pytest.mark.parametrize(("case", "groups"), [("tp4-sp", 2), ("tp2", 1)])
def test_ranks_share_a_query_group(worker_pool, case, groups):
    config = replace(CONFIGS["untied"], num_query_groups=groups)
    one = step(Mesh.single(), config, Case(ParallelLayout(dp=1)))
    ranks = worker_pool.run_mesh(CASES[case].layout, step, config, CASES[case])
    worst, where = largest_difference(one, ranks, 1)
    assert worst <= TOLERANCE, where


def test_ranks_that_share_a_query_group_decode_with_its_keys(worker_pool):
    config = replace(CONFIGS["untied"], num_query_groups=2)
    whole = decoded(Mesh.single(), config)
    ranks = worker_pool.run_mesh(CASES["tp4-sp"].layout, decoded, config)
    torch.testing.assert_close(torch.cat(ranks, -1), whole, rtol=0, atol=TOLERANCE)


def decoded(mesh, config):
    """Returns this rank's columns of the logits of seven tokens: five at once, then one by one."""
    model = GPT(config, Placement(mesh, dtype=torch.float64))
    tokens = make_batch(1)["tokens"]
    cache = StaticKVCache(config, mesh, BATCH, LENGTH, dtype=torch.float64)
    with torch.no_grad():
        parts = [model(tokens[:, at], cache=cache) for at in (slice(5), slice(5, 6), slice(6, 7))]
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("heads", "groups", "ranks", "message"),
    [
        (6, 2, 4, r"2 of 4 .* ranks share a query group and cannot share its 3 heads .* \(6\)"),
        (12, 3, 4, "4 ranks of axis 'tp' cannot share the 3 entries of dim 0"),
    ],
)
def test_heads_that_ranks_cannot_share_are_refused(heads, groups, ranks, message):
    config = GPTConfig(
        **SHAPE | {"num_attention_heads": heads, "num_query_groups": groups, "hidden_size": 48}
    )
    with pytest.raises(LayoutError, match=message):
        GPT(config, Mesh(ParallelLayout(tp=ranks, dp=1), 1))


def test_ranks_equal_one_rank_without_dropout_and_dropout_changes_losses(worker_pool, one_rank):
    case = CASES["tp2-sp-pp2"]
    one = one_rank("tied", 0.0, 0.0)
    ranks = worker_pool.run_mesh(case.layout, step, CONFIGS["tied"], case, 0.0, 0.0)
    worst, where = largest_difference(one, ranks, 2)
    assert worst <= TOLERANCE, where
    for rates in ((0.2, 0.0), (0.0, 0.3)):
        assert abs(one[1] - one_rank("tied", *rates)[1]) > 1e-3


# -- planted defects: the comparison above can fail -------------------------------------------


def no_sum_over_the_parts():
    """Skips the sum of partial gradients of norms, positions and biases."""
    made = Sharding.__init__

    def whole(self, *arguments, **options):
        made(self, *arguments, **options | {"partial": None})

    return Sharding, "__init__", whole


def no_part_of_the_key():
    """Makes every rank use the dropout of the beginning of the sequence."""

    def first_part(dropout, sequence_axis, indices=None):
        length = len(dropout.key.word0) // (sequence_axis.size if sequence_axis else 1)
        return StageDropout(dropout, dropout.key.narrow(0, length))

    return StageDropout, "from_dropout", first_part


def heads_counted_from_zero():
    """Makes every rank use the attention dropout of the first heads."""
    true = Context.attention_dropout

    def wrong(self, layer, first_head, site):
        return true(self, layer, 0, site)

    return Context, "attention_dropout", wrong


def positions_from_zero():
    """Makes every rank embed its slice of the sequence with the first positions."""
    look_up = EmbeddingTable.forward

    def wrong(self, length, positions, offset):
        return look_up(self, length, None, 0)

    return EmbeddingTable, "forward", wrong


def tied_weight_not_summed():
    """Skips the sum of the tied weight's gradients of first and last stage."""
    return Sharding, "tied", property(lambda self: None, lambda self, value: None)


DEFECTS = {
    each.__name__: each
    for each in (
        no_sum_over_the_parts,
        no_part_of_the_key,
        heads_counted_from_zero,
        positions_from_zero,
        tied_weight_not_summed,
    )
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_defects_are_detected(worker_pool, one_rank, defect):
    case = CASES["tp2-sp-pp2"]
    ranks = worker_pool.run_mesh(case.layout, step, CONFIGS["tied"], case, *RATES, defect)
    worst, where = largest_difference(one_rank("tied"), ranks, 2)
    assert worst > 1e-6, where


def test_a_sequence_that_cannot_be_split_is_refused():
    mesh = Mesh(ParallelLayout(tp=4).resolve(4), 1)
    model = GPT(CONFIGS["tied"], Placement(mesh, sequence_parallel=True))
    message = "10 tokens cannot be divided over 4 sequence-parallel ranks; use 8 or 12 tokens"
    with pytest.raises(ConfigError, match=message):
        model(torch.zeros(2, 10, dtype=torch.int64))
    with pytest.raises(ConfigError, match=message):
        model.stage_output_spec(2, 10)
