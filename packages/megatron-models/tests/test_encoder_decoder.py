"""The encoder-decoder equals torch's layers, and its stages return the specified outputs.

`integration_tests/test_encoder_decoder_stages.py` compares several ranks with one.
"""

from dataclasses import replace
from unittest.mock import patch

import jaxtyping
import pytest
import torch
from megatron_kernels import Mask
from megatron_models import (
    ConfigError,
    DenseKV,
    Dropout,
    EncoderDecoder,
    EncoderDecoderConfig,
    Placement,
    StaticKVCache,
    encoder_decoder_flops,
)
from megatron_parallel import DropoutKey, LayoutError, Mesh, ParallelLayout, RecomputeConfig
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

SOURCE, TARGET, BATCH, VOCAB = 8, 12, 2, 61
TOLERANCE = 1e-12

SHAPE = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "make_vocab_size_divisible_by": 64,
    "max_position_embeddings": 16,
    "ffn_hidden_size": 24,
    "untie_embeddings_and_output_weights": True,
    "separate_decoder_embedding": True,
}
LEARNED = EncoderDecoderConfig(**SHAPE, num_query_groups=2, encoder_num_layers=2)


@pytest.fixture
def batch():
    """Returns texts of two lengths, with padding of the source and labels without loss."""
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(VOCAB, (BATCH, TARGET + 1), generator=generator)
    labels = text[:, 1:].clone()
    labels[0, :5] = -100
    padding = torch.zeros(BATCH, SOURCE, dtype=torch.bool)
    padding[1, SOURCE - 3 :] = True
    return {
        "source": torch.randint(VOCAB, (BATCH, SOURCE), generator=generator),
        "target": text[:, :-1],
        "source_padding": padding,
        "labels": labels,
    }


# -- torch's own layers -----------------------------------------------------------------------


class Reference(nn.Module):
    """The same model from torch layers; its weights are replaced by copies."""

    def __init__(self, config):
        super().__init__()
        width, heads, ffn = config.hidden_size, config.num_attention_heads, config.ffn_hidden_size
        options = {"dropout": 0.0, "activation": "gelu", "norm_first": True, "batch_first": True}
        encoder = nn.TransformerEncoderLayer(width, heads, ffn, **options)
        decoder = nn.TransformerDecoderLayer(width, heads, ffn, **options)
        self.encoder = nn.TransformerEncoder(
            encoder, 2, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(decoder, config.num_layers, nn.LayerNorm(width))
        self.words, self.positions = nn.ModuleDict(), nn.ModuleDict()
        for half in ("encoder", "decoder"):
            self.words[half] = nn.Embedding(config.padded_vocab_size, width)
            self.positions[half] = nn.Embedding(config.max_position_embeddings, width)
        self.output = nn.Linear(width, config.padded_vocab_size, bias=False)
        self.double()

    def forward(self, source, target, source_padding, labels):
        x = self.words["encoder"](source) + self.positions["encoder"].weight[: source.shape[1]]
        encoded = self.encoder(x, src_key_padding_mask=source_padding)
        y = self.words["decoder"](target) + self.positions["decoder"].weight[: target.shape[1]]
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=y.dtype)
        seen = source_padding
        y = self.decoder(y, encoded, causal, memory_key_padding_mask=seen, tgt_is_causal=True)
        logits = self.output(y)[..., :VOCAB]
        return functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def as_torch(values, config):
    """Returns our parameters, or their gradients, with torch's names and order of rows."""
    names = {
        "attention.out.": "self_attn.out_proj.",
        "cross_attention.out.": "multihead_attn.out_proj.",
        "attention_norm.": "norm1.",
        "cross_attention_norm.": "norm2.",
        "mlp.up.": "linear1.",
        "mlp.down.": "linear2.",
    }
    made = {"output.weight": values["output.weight"]}
    for half in ("encoder", "decoder"):
        made[f"words.{half}.weight"] = values[f"{half}.embedding.word.weight"]
        made[f"positions.{half}.weight"] = values[f"{half}.embedding.position.weight"]
        for kind in ("weight", "bias"):
            made[f"{half}.norm.{kind}"] = values[f"{half}.final_norm.{kind}"]
    for name, value in values.items():
        if ".layers." not in name:
            continue
        half, _, layer, rest = name.split(".", 3)
        kind = rest.rsplit(".", 1)[1]
        known = names | {"mlp_norm.": "norm2." if half == "encoder" else "norm3."}
        prefix = f"{half}.layers.{layer}"
        parts = value.unflatten(1, (-1, config.kv_channels)) if ".q" in name or "kv" in name else 0
        if rest.startswith("attention.qkv"):
            made[f"{prefix}.self_attn.in_proj_{kind}"] = parts.transpose(0, 1).flatten(0, 2)
        elif rest.startswith("cross_attention.kv"):
            q = values[name.replace(".kv.", ".q.")].flatten(0, 1)
            kv = parts.transpose(0, 1).flatten(0, 2)
            made[f"{prefix}.multihead_attn.in_proj_{kind}"] = torch.cat([q, kv])
        elif not rest.startswith("cross_attention.q"):
            made[f"{prefix}.{known[rest.removesuffix(kind)]}{kind}"] = value
    return made


@pytest.fixture
def pair():
    """Returns our model, with one query group per head, and torch's with equal weights."""
    config = EncoderDecoderConfig(**SHAPE, encoder_num_layers=2)
    model = EncoderDecoder(config, Placement(Mesh.single(), dtype=torch.float64))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += noise * 0.2
    reference = Reference(config)
    reference.load_state_dict(as_torch(dict(model.named_parameters()), config))
    return model, reference


def differences(model, reference, batch):
    """Returns the largest differences of losses and gradients, relative to the largest gradient."""
    ours, theirs = model(**batch), reference(**batch)
    ours.sum().backward()
    theirs.sum().backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    mapped = as_torch(gradients, model.config)
    assert set(mapped) == {name for name, _ in reference.named_parameters()}
    worst = {
        name: float((mapped[name] - each.grad).abs().max() / max(each.grad.abs().max(), 1.0))
        for name, each in reference.named_parameters()
    }
    return float((ours - theirs).detach().abs().max()), max(worst.values())


def test_the_whole_model_equals_torch_layers(pair, batch):
    loss, gradient = differences(*pair, batch)
    assert loss <= TOLERANCE
    assert gradient <= TOLERANCE


def test_cross_attention_to_padding_differs_from_torch(pair, batch):
    made = "megatron_models.models.encoder_decoder.model.mask_of_source"
    with patch(made, lambda *_: Mask(causal=False)):
        loss, gradient = differences(*pair, batch)
    assert loss > 1e-3
    assert gradient > 1e-3


def test_operations_of_two_texts_equal_those_that_torch_counts():
    config = replace(T5, num_layers=3, max_position_embeddings=32)
    model = EncoderDecoder(config, Mesh.single())
    source, target = torch.randint(VOCAB, (3, 20)), torch.randint(VOCAB, (3, 28))
    # torch does not count its fused kernels on CPUs.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        model(source=source, target=target)
    # torch counts all query-key pairs of causal attention, and the formula half of them.
    unseen = 3 * 3 * 28**2 * config.query_size * 2
    assert encoder_decoder_flops(config, 20, 28, 3) == 3 * (counted.get_total_flops() - unseen)


# -- shapes and refusals ----------------------------------------------------------------------


def rank_of(rank, **degrees):
    """Returns the mesh of one rank, which cannot communicate."""
    layout = ParallelLayout(**degrees)
    return Mesh(layout.resolve(layout.tp * layout.pp * layout.cp), rank)


T5 = EncoderDecoderConfig(
    **{**SHAPE, "untie_embeddings_and_output_weights": False, "separate_decoder_embedding": False},
    encoder_num_layers=2,
    position_embedding_type="relative",
    normalization="RMSNorm",
    softmax_scale=1.0,
    add_bias_linear=False,
)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (LEARNED, {"encoder_stages": 1}),
        (LEARNED, {"split": (range(2), range(2, 5), range(5, 6))}),
        (T5, {"encoder_stages": 1}),
    ],
)
def test_stages_together_are_the_whole_model_with_its_names_and_initial_weights(config, options):
    whole = dict(EncoderDecoder(config, Mesh.single()).named_parameters())
    assert {name: tuple(each.shape) for name, each in whole.items()} == {
        name: each.sharding.local_shape(Mesh.single()) for name, each in config.parameters().items()
    }
    found = set()
    for rank in range(3):
        stage = EncoderDecoder(config, rank_of(rank, pp=3), **options)
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, whole[name]), name
            found.add(name)
    assert found == set(whole)


def test_stages_return_the_specified_outputs_and_padding_has_no_logits(batch):
    stages = [EncoderDecoder(LEARNED, rank_of(rank, pp=4)) for rank in range(4)]
    given = {name: batch[name] for name in ("source", "target", "source_padding")}
    out = ()
    for number, stage in enumerate(stages[:3]):
        out = stage(*out, **given)
        out = out if isinstance(out, tuple) else (out,)
        said = stages[0].stage_output_spec(number, BATCH, SOURCE, TARGET)
        assert [tuple(t.shape) for t in out] == [each.shape for each in said]
    logits = stages[3](*out, **given)
    assert logits.shape == (TARGET, BATCH, 64)
    assert (logits[..., VOCAB:] == -torch.inf).all()
    torch.testing.assert_close(logits, EncoderDecoder(LEARNED, Mesh.single())(**given))


@pytest.mark.parametrize(
    ("degrees", "options", "message"),
    [
        ({"pp": 4}, {"encoder_stages": 4}, "encoder_stages=4 of 4 stages leaves"),
        ({"pp": 4}, {"encoder_stages": 1}, "the decoder's 4 layers .* over its 3 stages"),
        ({"pp": 4}, {"encoder_stages": 3}, "the encoder's 2 layers .* over its 3 stages"),
        ({}, {"encoder_stages": 1}, "encoder_stages=1 needs a pipeline"),
        ({"pp": 2}, {"chunk": 1}, "chunk 1 does not exist: the layout has vpp=1"),
        ({"cp": 2}, {}, "context parallelism: cp=2"),
        (
            {"pp": 2},
            {"split": (range(3), range(3, 6))},
            r"stage 0 of 2 has layers 0:3, of the encoder \(0:2\) .*; use 3 stages",
        ),
        ({"pp": 2}, {"split": (range(2), range(2, 4))}, "do not cover layers 0:6 in order"),
        ({"pp": 2}, {"split": (range(6),)}, "the split has 1 stages, but the pipeline has 2"),
        (
            {"pp": 2},
            {"split": (range(2), range(2, 6)), "encoder_stages": 1},
            "split and encoder_stages exclude each other",
        ),
    ],
)
def test_unsupported_layouts_are_refused_in_one_line(degrees, options, message):
    rank = degrees.get("pp", 1) - 1
    with pytest.raises(ConfigError, match=message) as caught:
        EncoderDecoder(LEARNED, rank_of(rank, **degrees), **options)
    assert "\n" not in str(caught.value)


def test_what_a_rank_cannot_cut_or_share_is_refused(batch):
    model = EncoderDecoder(LEARNED, Placement(rank_of(0, tp=2), sequence_parallel=True))
    with pytest.raises(ConfigError, match="of 7 tokens cannot be divided over 2"):
        model(source=batch["source"][:, :7], target=batch["target"])
    saved = RecomputeConfig("full", "uniform", 1, distribute_saved_activations=True)
    with pytest.raises(LayoutError, match="needs at least 2 tensor parallel ranks"):
        EncoderDecoder(LEARNED, Placement(Mesh.single(), recompute=saved))


def test_unsupported_features_are_refused_by_name():
    with pytest.raises(ConfigError, match="no attention sinks: softmax_type learnable"):
        replace(LEARNED, softmax_type="learnable")
    with pytest.raises(ConfigError, match="unknown model configuration key 'num_experts'"):
        EncoderDecoderConfig.from_dict({**LEARNED.to_dict(), "num_experts": 4})
    with pytest.raises(ConfigError, match="encoder_num_layers must be a positive number, not -1"):
        replace(LEARNED, encoder_num_layers=-1)


def test_invalid_calls_are_refused_in_one_line(monkeypatch, batch):
    # User programs do not check shapes in annotations, which would fail first.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    model = EncoderDecoder(LEARNED, Mesh.single())
    source, target = batch["source"], batch["target"]
    key = DropoutKey.for_batch(seed=1, iteration=1, samples=torch.arange(BATCH), positions=SOURCE)
    calls = {
        "stage 0 embeds target tokens": {"source": source},
        "target has 1 sequences and the source 2": {"source": source, "target": target[:1]},
        r"source_padding is \[2, 12\] for a source of \[2, 8\]": {
            "source": source,
            "target": target,
            "source_padding": torch.zeros(BATCH, TARGET, dtype=torch.bool),
        },
        "covers 8 of 12 positions of a text": {
            "source": source,
            "target": target,
            "dropout": Dropout(key, 0.1),
        },
        "a sequence of 24 tokens is longer": {"source": source.repeat(1, 3), "target": target},
    }
    for message, given in calls.items():
        with pytest.raises(ConfigError, match=message) as caught:
            model(**given)
        assert "\n" not in str(caught.value)
    later = EncoderDecoder(LEARNED, rank_of(3, pp=4))
    with pytest.raises(ConfigError, match="stage 3, with 2 stages of the encoder, takes 2 tensors"):
        later(torch.zeros(SOURCE, BATCH, 16))


# -- decoding ---------------------------------------------------------------------------------

ROTARY = replace(LEARNED, position_embedding_type="rope", normalization="RMSNorm")


@pytest.mark.parametrize("config", [LEARNED, ROTARY], ids=["learned", "rope"])
def test_decoding_with_a_cache_equals_the_whole_target(config, batch):
    model = EncoderDecoder(config, Placement(Mesh.single(), dtype=torch.float64))
    batch.pop("labels")
    source, target, padding = batch["source"], batch["target"], batch["source_padding"]
    first = config.encoder_num_layers  # numbers of the decoder's layers
    layers = range(first, first + config.num_layers)
    cache = StaticKVCache(config, model.mesh, BATCH, TARGET, dtype=torch.float64, layers=layers)
    with torch.no_grad():
        whole = model(**batch)
        for _ in range(2):  # the second time with a used cache
            given = {"source": source, "source_padding": padding, "cache": cache}
            steps = [model(target=target[:, :3], **given)]
            given.pop("source")
            steps += [model(target=target[:, i : i + 1], **given) for i in range(3, 6)]
            ends = torch.tensor([[5, 2]] * BATCH)
            some = model(target=target[:, 6:], logits_at=ends, **given)
            torch.testing.assert_close(torch.cat(steps), whole[:6], rtol=0, atol=TOLERANCE)
            torch.testing.assert_close(some, whole[[11, 8]], rtol=0, atol=TOLERANCE)
            assert cache.length == TARGET
            cache.truncate(0)


@torch.no_grad()
def test_positions_of_a_mask_are_those_of_the_target(batch):
    model = EncoderDecoder(LEARNED, Placement(Mesh.single(), dtype=torch.float64))
    batch.pop("labels")
    target, positions = batch.pop("target"), (torch.arange(TARGET) + 3).expand(BATCH, -1)
    whole = model(**batch, target=target, positions=positions)
    assert torch.equal(model(**batch, target=target, mask=Mask(positions=positions)), whole)
    assert not torch.equal(model(**batch, target=target), whole)
    options = {"dtype": torch.float64, "layers": range(2, 6)}
    cache, steps = StaticKVCache(LEARNED, model.mesh, BATCH, TARGET, **options), []
    for start, stop in ((0, 5), (5, 6), (6, TARGET)):
        mask = Mask(positions=positions[:, :stop])
        steps.append(model(**batch, target=target[:, start:stop], mask=mask, cache=cache))
        batch.pop("source", None)
    torch.testing.assert_close(torch.cat(steps), whole, rtol=0, atol=TOLERANCE)


@torch.no_grad()
def test_a_short_text_is_not_rotated_as_the_longest(batch):
    scaling = {"rope_scaling_type": "dynamic", "rope_scaling_factor": 2.0}
    scaled = replace(ROTARY, **scaling, rope_scaling_original_length=SOURCE)
    source, target = batch["source"], batch["target"]
    for length, equal in ((SOURCE, True), (TARGET, False)):
        one, other = (
            EncoderDecoder(config, Mesh.single())(source=source, target=target[:, :length])
            for config in (ROTARY, scaled)
        )
        assert torch.equal(one, other) == equal


def test_recomputed_layers_are_not_saved(batch):
    found = []
    for recompute in (RecomputeConfig(), RecomputeConfig("full", "uniform", 1)):
        sizes = []
        model = EncoderDecoder(LEARNED, Placement(Mesh.single(), recompute=recompute))
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x
        ):
            model(**batch)
        found.append(sum(sizes))
    assert found[1] < found[0] / 2


@torch.no_grad()
def test_invalid_decoding_is_refused(batch):
    model = EncoderDecoder(LEARNED, Placement(Mesh.single(), dtype=torch.float64))
    options = {"layers": range(2, 6), "dtype": torch.float64}
    cache = StaticKVCache(LEARNED, model.mesh, BATCH, TARGET, **options)
    target = batch["target"]
    with pytest.raises(ConfigError, match="layer 2 attends to an encoder's output that the cache"):
        model(target=target, cache=cache)
    words = DropoutKey(*torch.zeros(2, TARGET, BATCH, dtype=torch.int64))
    with pytest.raises(ConfigError, match="decoding has no dropout"):
        model(source=batch["source"], target=target, cache=cache, dropout=Dropout(words, 0.1))
    with pytest.raises(ConfigError, match="labels and logits_at exclude each other"):
        model(**batch, logits_at=torch.zeros(BATCH, 1, dtype=torch.int64))
    stage = EncoderDecoder(
        LEARNED, Placement(Mesh(ParallelLayout(pp=2, dp=1).resolve(2), 0), device="meta")
    )
    with pytest.raises(ConfigError, match="begins at the decoder's first stage"):
        stage(target=target, cache=cache)


class TokensOnly:
    """A cache for decoder-only models."""

    length = 0

    def update(self, layer, k, v):
        return DenseKV(k, v)


@torch.no_grad()
def test_a_cache_without_cross_attention_is_refused(batch):
    model = EncoderDecoder(LEARNED, Placement(Mesh.single()))
    with pytest.raises(ConfigError, match="which a cache of type TokensOnly does not store"):
        model(source=batch["source"], target=batch["target"], cache=TokensOnly())
