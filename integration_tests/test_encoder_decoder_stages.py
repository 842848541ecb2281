"""EncoderDecoder with tensor, sequence and pipeline parallelism equals one rank in float64.

The model is not symmetric: gains are not 1, biases are not 0, the vocabulary size is not divisible
by the number of ranks, query groups are shared, the two texts have different lengths, the source is
padded, and there is dropout.
"""

import zlib
from contextlib import ExitStack
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from megatron_models import (
    Dropout,
    EncoderDecoder,
    EncoderDecoderConfig,
    Placement,
)
from megatron_models.components.context import Context
from megatron_models.models.encoder_decoder.model import encoder_decoder_chunks
from megatron_parallel import (
    DropoutKey,
    GradientBuffers,
    Mesh,
    ParallelLayout,
    PipelineEngine,
    RecomputeConfig,
    collect_shardings,
    parameter_views,
)
from megatron_parallel.pipeline import stage_parameters

SOURCE, TARGET, BATCH, MICRO_BATCHES, VOCAB = 8, 12, 2, 4, 61
RATES = 0.2, 0.3
TOLERANCE = 1e-12

SHAPE = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "make_vocab_size_divisible_by": 64,
    "max_position_embeddings": 16,
    "ffn_hidden_size": 24,
}
THREE = {"untie_embeddings_and_output_weights": True, "separate_decoder_embedding": True}
LEARNED = EncoderDecoderConfig(**SHAPE, **THREE, num_query_groups=2, encoder_num_layers=2)
ROTARY = EncoderDecoderConfig(
    **SHAPE,
    num_query_groups=2,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
    encoder_num_layers=2,
    untie_embeddings_and_output_weights=True,  # one embedding of both sides
)
SHARED = EncoderDecoderConfig(**SHAPE, encoder_num_layers=2)
T5 = EncoderDecoderConfig(
    **SHAPE,
    position_embedding_type="relative",
    relative_attention_num_buckets=8,
    relative_attention_max_distance=10,
    normalization="RMSNorm",
    activation="geglu_tanh",
    add_bias_linear=False,
    softmax_scale=1.0,
    logits_scaling=4.0,
    encoder_num_layers=2,
)


@dataclass(frozen=True)
class Case:
    """A layout and the options of a model in it."""

    layout: ParallelLayout
    sequence_parallel: bool = False
    encoder_stages: int | None = None
    schedule: str = "1f1b"
    recompute: RecomputeConfig | None = None


CASES = {
    "tp2": Case(ParallelLayout(tp=2, dp=1)),
    "tp2-sp": Case(ParallelLayout(tp=2, dp=1), True),
    "tp4-sp": Case(ParallelLayout(tp=4, dp=1), True),  # ranks share a query group
    "pp2": Case(ParallelLayout(pp=2, dp=1)),
    "pp3": Case(ParallelLayout(pp=3, dp=1), encoder_stages=1),
    "pp4": Case(ParallelLayout(pp=4, dp=1)),
    "pp2-vpp2": Case(ParallelLayout(pp=2, vpp=2, dp=1), schedule="interleaved-1f1b"),
    "tp2-sp-pp2-vpp2": Case(
        ParallelLayout(tp=2, pp=2, vpp=2, dp=1), True, schedule="interleaved-1f1b"
    ),
}

COVERED_CASES = {"tp2", "pp2", "pp3"}
"""Cases that are marked slow, since other cases detect the same defects."""


def make_batch(number):
    """Returns a micro-batch: two text lengths, padding after the source, labels without loss."""
    generator = torch.Generator().manual_seed(number)
    text = torch.randint(VOCAB, (BATCH, TARGET + 1), generator=generator)
    labels = text[:, 1:].clone()
    labels[0, : 2 * number + 1] = -100
    padding = torch.zeros(BATCH, SOURCE, dtype=torch.bool)
    padding[1, SOURCE - 1 - number :] = True
    return {
        "source": torch.randint(VOCAB, (BATCH, SOURCE), generator=generator),
        "target": text[:, :-1],
        "source_padding": padding,
        "labels": labels,
        "samples": torch.arange(BATCH) + BATCH * number,
    }


def scramble(chunks, table, mesh):
    """Adds noise to every parameter, equal on every rank that holds it."""
    with torch.no_grad():
        for name, parameter in stage_parameters(chunks).items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(table[name].shape, generator=generator, dtype=torch.float64) * 0.2
            for piece in table[name].shard_boxes(mesh):
                parameter[piece.local.slices] += noise[piece.box.slices]


def step(mesh, config, case, defect=None):
    """Returns losses ``{micro-batch: [b, s]}`` of the last stage, and shards of the gradients."""
    with ExitStack() as stack:
        if defect is not None:
            stack.enter_context(patch.object(*DEFECTS[defect]()))
        placement = Placement(
            mesh,
            sequence_parallel=case.sequence_parallel,
            recompute=case.recompute or RecomputeConfig(),
            dtype=torch.float64,
        )
        chunks = encoder_decoder_chunks(config, placement, encoder_stages=case.encoder_stages)
        table = {}
        for chunk in chunks:
            table |= collect_shardings(chunk)
        scramble(chunks, table, mesh)
        losses = {}

        def inputs(batch, stage):
            given = {name: value for name, value in batch.items() if name != "samples"}
            key = DropoutKey.for_batch(
                seed=5, iteration=3, samples=batch["samples"], positions=max(SOURCE, TARGET)
            )
            return given | {"dropout": Dropout(key, *RATES)}

        def loss(output, batch):
            losses[int(batch["samples"][0])] = output.detach()
            return {"loss": output.sum()}

        engine = PipelineEngine(
            mesh,
            chunks,
            loss,
            inputs=inputs,
            stage_output_spec=lambda batch, stage: chunks[0].stage_output_spec(
                stage, BATCH, SOURCE, TARGET
            ),
            schedule=case.schedule,
        )
        buffers = GradientBuffers(stage_parameters(chunks), table, mesh)
        engine.run([make_batch(number) for number in range(MICRO_BATCHES)], {"loss": 7.0})
        buffers.finish()
    views = parameter_views(buffers.gradients(), table, mesh)
    return losses, [(name, v.offsets, v.tensor.clone()) for name in views for v in views[name]]


def largest_difference(one, ranks):
    """Returns the largest difference of losses and gradients from one rank, and its name."""
    losses, pieces = one
    whole = {name: gradient for name, _, gradient in pieces}
    seen = {name: torch.zeros_like(gradient) for name, gradient in whole.items()}
    differences = []
    for their_losses, parts in ranks:
        differences += [(float((t - losses[n]).abs().max()), n) for n, t in their_losses.items()]
        for name, offsets, gradient in parts:
            box = tuple(slice(o, o + n) for o, n in zip(offsets, gradient.shape, strict=True))
            seen[name][box] = 1
            # The gradient of the key bias is only rounding, since softmax is invariant to it.
            scale = max(whole[name].abs().max(), 1.0)
            differences.append((float((gradient - whole[name][box]).abs().max() / scale), name))
    assert any(their_losses for their_losses, _ in ranks)
    missing = [name for name, covered in seen.items() if not covered.all()]
    assert not missing, f"no rank has the gradient of {missing}"
    return max(differences, key=lambda each: each[0])


@pytest.fixture(scope="module")
def one_rank():
    configs = {"learned": LEARNED, "rotary": ROTARY, "shared": SHARED, "t5": T5}
    alone = Case(ParallelLayout(dp=1))
    return {name: step(Mesh.single(), config, alone) for name, config in configs.items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=pytest.mark.slow if name in COVERED_CASES else ())
        for name, case in CASES.items()
    ],
)
def test_losses_and_gradients_with_dropout_equal_one_rank(worker_pool, one_rank, case):
    ranks = worker_pool.run_mesh(case.layout, step, LEARNED, case)
    worst, where = largest_difference(one_rank["learned"], ranks)
    assert worst <= TOLERANCE, where


def test_rotary_positions_without_biases_equal_one_rank(worker_pool, one_rank):
    case = CASES["tp2-sp-pp2-vpp2"]
    ranks = worker_pool.run_mesh(case.layout, step, ROTARY, case)
    worst, where = largest_difference(one_rank["rotary"], ranks)
    assert worst <= TOLERANCE, where


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["tp2-sp", "pp3", "tp2-sp-pp2-vpp2"])
def test_an_embedding_of_both_sides_and_the_output_equals_one_rank(worker_pool, one_rank, name):
    ranks = worker_pool.run_mesh(CASES[name].layout, step, SHARED, CASES[name])
    worst, where = largest_difference(one_rank["shared"], ranks)
    assert worst <= TOLERANCE, where


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["tp4-sp", "pp4", "tp2-sp-pp2-vpp2"])
def test_biases_by_relative_position_equal_one_rank(worker_pool, one_rank, name):
    ranks = worker_pool.run_mesh(CASES[name].layout, step, T5, CASES[name])
    worst, where = largest_difference(one_rank["t5"], ranks)
    assert worst <= TOLERANCE, where


@pytest.mark.parametrize(
    "recompute",
    [
        RecomputeConfig("selective", modules=("core_attn", "mlp", "layernorm")),
        RecomputeConfig("full", "uniform", 1),
    ],
    ids=["selective", "full"],
)
def test_recomputed_layers_give_the_same_gradients(one_rank, recompute):
    case = Case(ParallelLayout(dp=1), recompute=recompute)
    worst, where = largest_difference(one_rank["learned"], [step(Mesh.single(), LEARNED, case)])
    assert worst == 0.0, where


# -- planted defects: the comparison above can fail -------------------------------------------


def encoder_output_of_another_micro_batch():
    """Makes a decoder stage attend to the encoder output of the previous micro-batch."""
    run, kept = EncoderDecoder.forward, {}

    def wrong(self, *received, **options):
        if len(received) == 2:
            old = kept.get(self.stage, received[1].detach())
            kept[self.stage] = received[1].detach()
            received = received[0], old + 0 * received[1]
        return run(self, *received, **options)

    return EncoderDecoder, "forward", wrong


def gradient_of_later_decoder_stages_lost():
    """Gives the encoder output only the gradient of the first decoder stage."""
    run = EncoderDecoder.forward

    def wrong(self, *received, **options):
        output = run(self, *received, **options)
        if not isinstance(output, tuple):
            return output
        encoded = output[1] * 1.0
        encoded.register_hook(torch.zeros_like)
        return output[0], encoded

    return EncoderDecoder, "forward", wrong


def cross_attention_drops_like_self_attention():
    """Uses the dropout site of self-attention for cross-attention, unlike the single rank."""
    true = Context.attention_dropout

    def wrong(self, layer, first_head, site):
        return true(self, layer, first_head, 1)

    return Context, "attention_dropout", wrong


DEFECTS = {
    each.__name__: each
    for each in (
        encoder_output_of_another_micro_batch,
        gradient_of_later_decoder_stages_lost,
        cross_attention_drops_like_self_attention,
    )
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_defects_are_detected(worker_pool, one_rank, defect):
    case = CASES["pp2-vpp2"]
    ranks = worker_pool.run_mesh(case.layout, step, LEARNED, case, defect)
    assert largest_difference(one_rank["learned"], ranks)[0] > 1e-3
