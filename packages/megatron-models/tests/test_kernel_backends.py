"""A model calls every operation with the backend that its placement chooses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron_kernels import Mask, Op, Scores, find_operation, vocab_embedding
from megatron_models import (
    GPT,
    Bert,
    BertConfig,
    ConfigError,
    Dropout,
    EncoderDecoder,
    EncoderDecoderConfig,
    GPTConfig,
    HybridConfig,
    ModelConfig,
    Placement,
    StaticKVCache,
    check_backends,
    explain_backends,
    operations_of,
)
from megatron_models.components.attention.context_parallel import _Blocks, _Lowered
from megatron_models.fused_operations import FUSED, SEPARATE
from megatron_models.kernel_backends import BLOCKS
from megatron_parallel import DropoutKey, Mesh, RecomputeConfig

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "vocab_size": 61,
    "max_position_embeddings": 16,
    "num_attention_heads": 4,
}
MAMBA = {"mamba_num_groups": 2, "mamba_head_dim": 4, "mamba_state_dim": 5, "mamba_chunk_size": 6}
DELTA = {
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LATENT = {
    "multi_latent_attention": True,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}
SPARSE = {"dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 3}
ROPE = {"position_embedding_type": "rope", "normalization": "RMSNorm"}
DECODERS: dict[str, ModelConfig] = {
    "gpt": GPTConfig(**SIZES, num_layers=2, activation="gelu_tanh"),
    "llama": GPTConfig(**SIZES, **ROPE, num_layers=2, activation="swiglu", qk_layernorm=True),
    "l2-norm": GPTConfig(**SIZES, **ROPE, num_layers=2, activation="geglu", qk_l2_norm=True),
    "latent": GPTConfig(**SIZES, **ROPE, **LATENT, num_layers=2),
    "sparse": GPTConfig(
        **SIZES,
        **ROPE,
        **LATENT,
        **SPARSE,
        num_layers=2,
        experimental_attention_variant="dsa",
    ),
    "hybrid": HybridConfig(
        **SIZES, **ROPE, **MAMBA, **DELTA, hybrid_layer_pattern="M*-MGE", num_experts=4
    ),
}


@contextmanager
def calls() -> Iterator[list[tuple[str, str]]]:
    """Records operation and requested backend of each call."""
    found: list[tuple[str, str]] = []
    run = Op.run

    def recorded(op: Op[..., Any], requested: str, *args: Any) -> Any:
        found.append((op.name, requested))
        return run(op, requested, *args)

    with mock.patch.object(Op, "run", recorded):
        yield found


def forward(config: ModelConfig, model: torch.nn.Module) -> torch.Tensor:
    """Returns the logits of a pass, after others that decode with a cache."""
    tokens = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
    cache = StaticKVCache(config, Mesh.single(), batch_size=2, max_length=9, dtype=torch.float64)
    with torch.no_grad():
        model(tokens[:, :6], cache=cache)
        model(tokens[:, 6:], cache=cache)
    logits: torch.Tensor = model(tokens)
    return logits


@pytest.mark.parametrize("name", DECODERS)
def test_every_operation_is_called_with_the_chosen_backend(name: str) -> None:
    config = DECODERS[name]
    chosen = dict.fromkeys([o for o in operations_of(config) if o not in FUSED], "reference")
    placement = Placement(Mesh.single(), dtype=torch.float64, backends=chosen)
    model = GPT(config, placement)
    with calls() as found:
        y = forward(config, model)
        y.sum().backward()
    assert dict.fromkeys(found) == dict.fromkeys((op, "reference") for op, _ in found)
    assert {op for op, _ in found} == {*chosen} - {*BLOCKS}
    plain = GPT(config, Placement(Mesh.single(), dtype=torch.float64))
    torch.testing.assert_close(forward(config, plain), y, rtol=1e-11, atol=1e-11)


FULL = RecomputeConfig(granularity="full", method="uniform", num_layers=1)
NORMS = RecomputeConfig(granularity="selective", modules=("layernorm",))


@pytest.mark.parametrize(
    ("name", "options", "recompute"),
    [
        *((name, {}, RecomputeConfig()) for name in DECODERS),
        ("llama", {"norm_placement": "sandwich"}, RecomputeConfig()),
        ("llama", {"parallel_residual": "two_norms"}, RecomputeConfig()),
        ("llama", {"parallel_residual": "shared_norm"}, RecomputeConfig()),
        ("llama", {"residual_multiplier": 0.5}, RecomputeConfig()),
        ("llama", {"activation_func_clamp_value": 0.02}, RecomputeConfig()),
        ("llama", {"glu_linear_offset": 1.0}, RecomputeConfig()),
        ("l2-norm", {}, NORMS),
        ("l2-norm", {}, FULL),
    ],
)
def test_fused_operations_replace_several_others(
    name: str, options: dict[str, Any], recompute: RecomputeConfig
) -> None:
    config = replace(DECODERS[name], **options)
    chosen = dict.fromkeys([o for o in operations_of(config) if o in FUSED], "reference")
    tokens = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
    key = DropoutKey.for_batch(seed=1, iteration=2, samples=torch.arange(2), positions=9)
    found = []
    for backends in (chosen, {}):
        mesh = Mesh.single()
        model = GPT(config, Placement(mesh, torch.float64, recompute=recompute, backends=backends))
        with calls() as made:
            losses = model(tokens, labels=tokens, dropout=Dropout(key, hidden=0.25))
        losses.sum().backward()
        found.append([losses, *(parameter.grad for parameter in model.parameters())])
        called = {op for op, _ in made} & {*FUSED}
        separate = {"parallel_residual", "residual_multiplier"} & options.keys()
        alone = {*backends} - ({"bias_dropout_add"} if separate else set())
        assert called == alone
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-10)
    assert {"vocab_embedding", "bias_dropout_add"} < {*chosen}


def test_the_last_addition_of_a_layer_is_left_to_the_first_norm_of_the_next() -> None:
    model = GPT(DECODERS["llama"], Placement(Mesh.single(), backends={"add_rms_norm": "reference"}))
    adds, run = [], Op.run

    def recorded(op: Op[..., Any], requested: str, *args: Any) -> Any:
        if op.name == "add_rms_norm":
            adds.append(args[1] is not None)
        return run(op, requested, *args)

    with mock.patch.object(Op, "run", recorded):
        model(torch.arange(6)[None])
    assert adds == [False, True, True, True]  # two norms in each of two layers


@pytest.mark.parametrize(
    ("build", "config", "inputs"),
    [
        (Bert, BertConfig(**SIZES, num_layers=2), {"x": torch.arange(12).view(2, 6)}),
        (
            EncoderDecoder,
            EncoderDecoderConfig(**SIZES, num_layers=2, encoder_num_layers=2),
            {"source": torch.arange(12).view(2, 6), "target": torch.arange(8).view(2, 4)},
        ),
    ],
    ids=["bert", "t5"],
)
def test_encoders_call_operations_with_the_chosen_backend(
    build: Callable[..., torch.nn.Module], config: ModelConfig, inputs: dict[str, torch.Tensor]
) -> None:
    chosen = dict.fromkeys([o for o in operations_of(config) if o not in FUSED], "reference")
    model = build(config, Placement(Mesh.single(), dtype=torch.float64, backends=chosen))
    with calls() as found:
        model(**inputs)
    assert {requested for _, requested in found} == {"reference"}
    assert {op for op, _ in found} == {*chosen} - {*BLOCKS}


def test_blocks_of_a_ring_use_the_chosen_backends() -> None:
    """The ring itself needs several ranks: integration_tests/test_gpt_context_parallel.py."""
    blocks = _Blocks(None, 0, 0, Scores(), dict.fromkeys(BLOCKS, "reference").__getitem__)
    q = torch.randn(5, 1, 2, 8, dtype=torch.float64)
    positions = torch.arange(5, dtype=torch.int32)[None]
    mask = _Lowered(Mask(positions=positions, query_positions=positions), positions, positions)
    with calls() as found:
        out, lse = blocks.forward(q, q, q, mask)
        blocks.backward(out, q, q, q, out, lse, mask)
    assert found == [("attention_forward", "reference"), ("attention_backward", "reference")]


def test_misspelt_names_and_operations_without_calls_are_refused() -> None:
    config = DECODERS["gpt"]
    check_backends(config, {"attention": "torch", "linear": "auto"})
    for chosen, message in (
        ({"atention": "torch"}, "no operation 'atention'; did you mean attention?"),
        ({"attention": "flash"}, "no backend 'flash'; did you mean 'flash_attn'?"),
        ({"bias_gelu": "flash"}, "bias_gelu has no backend 'flash'"),
        ({"ssd_scan": "chunked"}, "no layer of this model calls ssd_scan; choose backends of"),
    ):
        with pytest.raises(ConfigError) as error:
            check_backends(config, chosen)
        assert message in str(error.value)


def test_fused_operations_can_be_refused_by_name() -> None:
    config = replace(DECODERS["gpt"], activation="gelu")
    chosen = {"bias_gelu": SEPARATE, "vocab_cross_entropy": SEPARATE}
    check_backends(config, chosen)
    found = {choice.op: choice for choice in explain_backends(config, chosen)}
    choice = found["bias_gelu"]
    assert (choice.backend, choice.reason) == (SEPARATE, "requested")
    with pytest.raises(ConfigError, match="gelu has no backend 'separate'"):
        check_backends(config, {"gelu": SEPARATE})


@pytest.mark.parametrize("requested", ["auto", SEPARATE])
def test_operations_are_fused_where_one_kernel_computes_them(requested: str) -> None:
    """A device with such kernels is simulated: the reference stands for the kernel."""
    config = DECODERS["gpt"]
    names = [name for name in operations_of(config) if name in FUSED]
    backends = dict.fromkeys(names, requested)
    with mock.patch("megatron_models.placement.fuses_on", lambda *_: True):
        model = GPT(config, Placement(Mesh.single(), torch.float64, backends=backends))
    tokens = torch.arange(12).view(2, 6)
    with calls() as made:
        losses = model(tokens, labels=tokens)
    plain = GPT(config, Placement(Mesh.single(), torch.float64))
    torch.testing.assert_close(losses, plain(tokens, labels=tokens), rtol=1e-11, atol=1e-11)
    # There is no hidden dropout. The gradient is an operation of the backward pass.
    called = {op for op, _ in made} & {*FUSED}
    assert called == (set() if requested == SEPARATE else {*names} - {"bias_dropout_add"})


def test_a_backend_that_cannot_run_on_this_machine_is_refused_with_its_reason() -> None:
    config = DECODERS["llama"]
    choices = explain_backends(config, {"rope": "reference"}, dtype=torch.bfloat16)
    found = {choice.op: (choice.backend, choice.reason) for choice in choices}
    assert found["rope"] == ("reference", "requested")
    assert found["rms_norm"] == ("torch", "first choice")
    assert found["attention"][0] == "torch" and "vocab_embedding" not in found
    with pytest.raises(ConfigError) as error:
        explain_backends(config, {"attention": "flash_attn"})
    assert str(error.value) == (
        "attention cannot use backend flash_attn: needs a CUDA tensor, q is on cpu"
    )


def test_attention_alone_has_blocks_over_ranks() -> None:
    recurrent = HybridConfig(**SIZES, **MAMBA, hybrid_layer_pattern="M-")
    assert {*BLOCKS} < {*operations_of(DECODERS["gpt"])}
    assert not {*BLOCKS} & {*operations_of(recurrent)}
    requested = {"attention_forward": "reference"}
    found = {choice.op for choice in explain_backends(DECODERS["gpt"], requested)}
    assert found & {*BLOCKS} == {"attention_forward"}


@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_layers_use_backends_that_the_compiler_sees(compiled: bool) -> None:
    """On a device that fuses everything, which the compiler does itself."""
    config, chosen = DECODERS["llama"], {"rope": "reference"}
    with mock.patch("megatron_models.kernel_backends.fuses_on", lambda *_: True):
        choices = explain_backends(config, chosen, compiled=compiled)
    found = {choice.op: choice for choice in choices}
    fused = {*operations_of(config)} & {*FUSED}
    assert fused and found.keys() & {*FUSED} == (set() if compiled else fused)
    assert (found["rope"].backend, found["rope"].requested) == ("reference", "reference")
    for name in found.keys() - {"rope"}:
        seen = [backend.name for backend in find_operation(name).transparent]
        assert found[name].requested == (",".join(seen) if compiled else "auto")
        assert found[name].backend is not None


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ({}, "auto"),
        ({"compiled": True}, None),
        ({"backends": {"vocab_embedding": "reference"}}, "reference"),
        ({"backends": {"vocab_embedding": "reference"}, "compiled": True}, "reference"),
        ({"backends": {"vocab_embedding": SEPARATE}}, None),
    ],
)
def test_compiled_layers_fuse_what_is_chosen_alone(
    options: dict[str, Any], backend: str | None
) -> None:
    placement = Placement(Mesh.single(), **options)
    with mock.patch("megatron_models.placement.fuses_on", lambda *_: True):
        assert placement.fused(vocab_embedding) == backend
    on_a_cpu = None if backend == "auto" else backend
    assert placement.fused(vocab_embedding) == on_a_cpu
