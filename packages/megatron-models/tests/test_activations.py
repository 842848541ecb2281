"""Counted bytes of saved activations against the formula, and the formula against the paper."""

from dataclasses import replace
from typing import Any
from unittest import mock

import megatron_parallel.tensor_parallel.layers as layers
import pytest
import torch
from megatron_kernels import Mask
from megatron_models import (
    GPT,
    Dropout,
    ExpertParallelism,
    GPTConfig,
    LayerPass,
    Placement,
    SavedBytes,
    layer_activations,
    stack_activations,
)
from megatron_models.components.context import Context
from megatron_models.components.dropout import StageDropout
from megatron_models.components.stack import run_layers
from megatron_parallel import DropoutKey, Mesh, ParallelLayout, RecomputeConfig
from megatron_parallel.collectives import gather_sequence
from megatron_parallel.recompute import count_saved_activations
from torch.nn import functional

S, B = 12, 3
MODULES = ("core_attn", "mlp", "layernorm", "mla_up_proj")
SELECTIVE = [
    RecomputeConfig(),
    *(RecomputeConfig(granularity="selective", modules=(module,)) for module in MODULES),
    RecomputeConfig(granularity="selective", modules=MODULES),
]
FULL = [
    RecomputeConfig(granularity="full", method="uniform", num_layers=4),
    RecomputeConfig(granularity="full", method="uniform", num_layers=1),
    RecomputeConfig(granularity="full", method="block", num_layers=5),
    RecomputeConfig(cpu_offloading_num_layers=3),
]


def counted(
    config: GPTConfig,
    dtype: torch.dtype,
    plan: RecomputeConfig,
    dropout: bool,
    mesh: Mesh | None = None,
    sequence_parallel: bool = False,
    dispatcher: str = "allgather",
) -> dict[str, int]:
    """Returns the bytes of a stack of layers by module, without those that all layers share."""
    mesh = mesh or Mesh.single()
    placement = Placement(
        mesh,
        dtype=dtype,
        recompute=plan,
        sequence_parallel=sequence_parallel,
        dispatcher=dispatcher,
    )
    model = GPT(config, placement)
    key = DropoutKey.for_batch(seed=1, iteration=1, samples=torch.arange(B), positions=S)
    cut = model.tp if sequence_parallel else None
    drop = StageDropout.from_dropout(Dropout(key, 0.1, 0.1), cut) if dropout else None
    angles = model.rotary(S, 0, None)
    context = Context(Mask(), angles, dropout=drop, recompute=plan)
    length = S // model.tp.size if sequence_parallel else S
    x = torch.randn(length, B, config.hidden_size, dtype=dtype, requires_grad=True) * 1.0
    with count_saved_activations(model) as saved:
        run_layers(model.layers, x, context, model.tp)
    if dropout and not all(group.checkpointed for group in plan.groups(range(config.num_layers))):
        # All layers share the dropout key.
        saved.by_module["shared"] = -8 * S * B
    return saved.by_module


def of_cpu(config: GPTConfig, dtype: torch.dtype, dropout: bool) -> SavedBytes:
    return SavedBytes.cpu(
        dtype.itemsize,
        config.normalization,
        attention_dropout=dropout,
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dropout", [False, True], ids=["", "dropout"])
def test_every_term_equals_the_counted_bytes(config, dtype, dropout):
    config = replace(config, num_layers=2)
    for plan in (SELECTIVE[0], *SELECTIVE[-2:]):
        found = counted(config, dtype, plan, dropout)
        last = {n.removeprefix("layers.1."): b for n, b in found.items() if "layers.1" in n}
        last["dropout"] = last.pop("layers.1", 0)
        layer_pass = LayerPass(S, B, of_cpu(config, dtype, dropout), recompute=plan)
        terms = layer_activations(config, layer_pass, layer=1)
        for one in (last, terms):  # fused attention itself saves its output, which `out` reads
            one["attention"] = one.get("attention", 0) + one.pop("attention.out", 0)
            one["mlp"] = one.get("mlp", 0) + one.pop("mlp.down", 0)
            for norm in ("q_norm", "k_norm"):  # they save the projection that they share
                if not config.multi_latent_attention:
                    one["attention"] += one.pop(f"attention.{norm}", 0)
            if config.norm_placement in ("post", "sum"):  # checkpoints save the stream itself
                one["dropout"] += one.pop("mlp.up", 0)
        assert {n: b for n, b in last.items() if b} == {n: b for n, b in terms.items() if b}, plan


@pytest.mark.parametrize("length", [512, 513])
def test_a_dropout_mask_of_a_short_sequence_is_saved_as_bits(small, length, monkeypatch):
    monkeypatch.setitem(globals(), "S", length)
    config = small(num_layers=1, max_position_embeddings=length)
    saved_bytes = of_cpu(config, torch.float32, True)
    expected = stack_activations(config, LayerPass(length, B, saved_bytes))
    assert sum(counted(config, torch.float32, RecomputeConfig(), True).values()) == expected
    without = replace(saved_bytes, mask_bits=False)
    bits = B * config.num_attention_heads * length**2 * (length <= 512)
    assert 8 * (expected - stack_activations(config, LayerPass(length, B, without))) == bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dropout", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize(
    "knob",
    [
        {"attn_logit_softcapping": 2.0},
        {"softmax_type": "learnable"},
        {"softmax_type": "off-by-one", "attn_logit_softcapping": 2.0, "num_query_groups": 2},
    ],
    ids=["softcap", "learned sinks", "both"],
)
def test_unfused_attention_saves_scores_and_probabilities(small, knob, dropout, dtype):
    config = small(num_layers=2, **knob)
    for plan in SELECTIVE[:2]:
        found = counted(config, dtype, plan, dropout).items()
        parts = ("layers.1.attention", "layers.1.attention.out")
        saved = sum(size for name, size in found if name in parts)
        layer_pass = LayerPass(S, B, of_cpu(config, dtype, dropout), recompute=plan)
        terms = layer_activations(config, layer_pass)
        assert saved == terms["attention"] + terms["attention.out"], plan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("knob", [{"sliding_window": 3}, {"attention_chunk_size": 4}], ids=str)
def test_a_window_saves_its_mask_in_each_layer(small, knob, dtype):
    config = small(num_layers=2, **knob)
    for dropout in (False, True):
        found = counted(config, dtype, SELECTIVE[0], dropout).items()
        parts = ("layers.1.attention", "layers.1.attention.out")
        saved = sum(size for name, size in found if name in parts)
        layer_pass = LayerPass(S, B, of_cpu(config, dtype, dropout), recompute=SELECTIVE[0])
        terms = layer_activations(config, layer_pass)
        assert saved == terms["attention"] + terms["attention.out"], dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dropout", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize(
    "knob",
    [
        {"qk_l2_norm": True, "position_embedding_type": "rope"},
        {"attn_temperature_scale": 0.5, "position_embedding_type": "none"},
        {"position_embedding_type": "alibi"},
        {"attention_output_gate": True},
        {"attention_output_gate": True, "num_query_groups": 4, "qk_layernorm": True},
        {"attn_logit_softcapping": 2.0, "qk_layernorm": True},
        {"attn_logit_softcapping": 2.0, "qk_layernorm": True, "normalization": "LayerNorm"},
    ],
    ids=[
        "qk_l2_norm",
        "attn_temperature_scale",
        "alibi",
        "attention_output_gate",
        "all heads",
        "bounded RMSNorm",
        "bounded LayerNorm",
    ],
)
def test_an_option_of_attention_saves_the_bytes_of_the_formula(small, knob, dropout, dtype):
    config = small(**{"num_layers": 2, "normalization": "RMSNorm", "num_query_groups": 2} | knob)
    for plan in SELECTIVE[:2]:
        found = counted(config, dtype, plan, dropout).items()
        own = [f"layers.1.attention{part}" for part in ("", ".out", ".q_norm", ".k_norm")]
        saved = sum(size for name, size in found if name in own)
        layer_pass = LayerPass(S, B, of_cpu(config, dtype, dropout), recompute=plan)
        terms = layer_activations(config, layer_pass)
        assert saved == terms["attention"] + terms["attention.out"], plan


@pytest.mark.parametrize("dropout", [False, True], ids=["", "dropout"])
def test_layer_stacks_save_the_bytes_of_the_formula(small, dropout):
    config = small(num_layers=8)
    for plan in (*SELECTIVE, *FULL):
        found = sum(counted(config, torch.float32, plan, dropout).values())
        saved_bytes = of_cpu(config, torch.float32, dropout)
        expected = stack_activations(config, LayerPass(S, B, saved_bytes, recompute=plan))
        assert found == expected, plan


def test_the_constants_of_the_paper():
    """Korthikanti et al., table 2: sizes of GPT-3, in units of s b h."""
    s, b, a, h = 2048, 1, 96, 12288
    config = GPTConfig(
        num_layers=96,
        hidden_size=h,
        num_attention_heads=a,
        vocab_size=51200,
        max_position_embeddings=s,
    )
    square = 5 * a * s / h
    selective = RecomputeConfig(granularity="selective")
    full = RecomputeConfig(granularity="full", method="uniform", num_layers=1)

    def each(**options) -> float:
        layer_pass = LayerPass(s, b, SavedBytes.paper(), **options)
        return stack_activations(config, layer_pass, layers=[0]) / (s * b * h)

    assert square == 80
    assert each() == 34 + square
    assert each(tp=8) == 10 + 24 / 8 + square / 8
    assert each(tp=8, sequence_parallel=True) == (34 + square) / 8
    assert each(tp=8, recompute=selective) == 10 + 24 / 8
    assert each(tp=8, sequence_parallel=True, recompute=selective) == 34 / 8
    assert each(tp=8, recompute=full) == 2
    cut = replace(full, distribute_saved_activations=True)
    assert each(tp=8, recompute=cut) == 2 / 8


CUT = replace(FULL[0], distribute_saved_activations=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("ranks", "sequence_parallel"),
    [
        (2, True),
        (4, False),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(4, True, marks=pytest.mark.slow),
    ],
)
def test_ranks_save_the_bytes_of_the_formula(
    worker_pool, small, model_changes, ranks, sequence_parallel
):
    gated = {"normalization": "RMSNorm", "activation": "swiglu", "add_bias_linear": False}
    rotary = {"position_embedding_type": "rope", "num_query_groups": 2}
    plans = [*SELECTIVE, *FULL] if sequence_parallel else [*SELECTIVE, *FULL, CUT]
    few = [SELECTIVE[0], SELECTIVE[-1]]
    runs = [
        (config, dtype, plan, dropout)
        for config, chosen in (
            (small(num_layers=8), plans),
            (small(**gated, num_query_groups=2), few),
            (small(num_attention_heads=8, hidden_size=32, **rotary), few),
            (small(**model_changes["latent"]), few),
            (small(**model_changes["latent-queries"]), few),
        )
        for dtype, dropout in ((torch.float32, False), (torch.bfloat16, True))
        for plan in chosen
    ]
    options = {"sequence_parallel": sequence_parallel, "tp": ranks}
    expected = [
        stack_activations(c, LayerPass(S, B, of_cpu(c, dtype, dropout), recompute=plan, **options))
        for c, dtype, plan, dropout in runs
    ]
    for found in worker_pool.run_mesh(
        ParallelLayout(tp=ranks, dp=1), on_a_rank, runs, sequence_parallel
    ):
        assert [run for run, a, b in zip(runs, found, expected, strict=True) if a != b] == []


def on_a_rank(mesh: Mesh, runs: list[Any], sequence_parallel: bool) -> list[int]:
    return [sum(counted(*run, mesh, sequence_parallel).values()) for run in runs]


def test_saving_the_gathered_input_is_detected(worker_pool, small):
    run = (small(), torch.float32, RecomputeConfig(), False)
    saved_bytes = of_cpu(run[0], torch.float32, False)
    expected = stack_activations(run[0], LayerPass(S, B, saved_bytes, 2, sequence_parallel=True))
    for found in worker_pool.run_mesh(ParallelLayout(tp=2, dp=1), saving_the_gathered_input, run):
        # Other ranks' parts of two inputs of each of two layers.
        assert found == expected + 2 * 2 * S * B * run[0].hidden_size * 4 // 2


def saving_the_gathered_input(mesh: Mesh, run: Any) -> int:
    def wrong(x: Any, weight: Any, bias: Any, axis: Any, *_: Any, **__: Any) -> Any:
        whole = gather_sequence(x, axis)
        y = functional.linear(whole, weight.flatten(0, -2), bias.flatten())
        return y.view(*y.shape[:-1], *weight.shape[:-1])

    with mock.patch.object(layers, "column_parallel_linear", wrong):
        return sum(counted(*run, mesh, True).values())


MOE = {"num_experts": 4, "moe_ffn_hidden_size": 32, "moe_router_topk": 2}
GATED = {"activation": "swiglu", "add_bias_linear": False}
EXPERTS = [
    MOE,
    {**MOE, **GATED, "moe_shared_expert_intermediate_size": 8},
    {**MOE, **GATED},
    {**MOE, **GATED, "moe_expert_rank_capacity_factor": 1.5},
]
EXPERT_PLANS = [RecomputeConfig(), RecomputeConfig(granularity="selective", modules=("moe",))]


def by_part(found: dict[str, int]) -> dict[str, int]:
    """Returns the bytes of the layer's feed-forward part by the names of the formula."""
    parts: dict[str, int] = {}
    for name, count in found.items():
        name = name.removeprefix("layers.0.")
        if name.startswith("mlp") and not name.startswith("mlp_norm"):
            part = ".".join(name.split(".")[:2])
            parts[part] = parts.get(part, 0) + count
    return parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_experts_on_one_rank_save_the_bytes_of_the_formula(small, dtype):
    for changes in EXPERTS:
        for plan in EXPERT_PLANS:
            config = small(num_layers=1, **changes)
            found = sum(counted(config, dtype, plan, False).values())
            layer_pass = LayerPass(S, B, of_cpu(config, dtype, False), recompute=plan)
            assert found == stack_activations(config, layer_pass), (changes, plan)


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(tp=2, dp=1),
        ParallelLayout(tp=2, ep=2, etp=1, dp=1),
        pytest.param(ParallelLayout(dp=2, ep=2), marks=pytest.mark.slow),
        pytest.param(ParallelLayout(tp=4, ep=2, etp=2, dp=1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_experts_on_ranks_save_the_bytes_of_the_formula(worker_pool, small, layout):
    """The mean over ranks, since the rows of a rank depend on the routing."""
    runs = [
        (small(num_layers=1, **changes), dtype, plan, sequence_parallel, dispatcher)
        for changes in EXPERTS
        for dtype in (torch.float32, torch.bfloat16)
        for plan in EXPERT_PLANS
        for sequence_parallel in ((False, True) if layout.tp > 1 else (False,))
        for dispatcher in ("allgather", "alltoall")
    ]
    ranks = worker_pool.run_mesh(layout, experts_on_a_rank, runs)
    for run, found in zip(runs, zip(*ranks, strict=True), strict=True):
        config, dtype, plan, sequence_parallel, dispatcher = run
        layer_pass = LayerPass(
            S,
            B,
            of_cpu(config, dtype, False),
            layout.tp,
            sequence_parallel=sequence_parallel,
            recompute=plan,
            experts=ExpertParallelism(layout.ep, layout.expert_tp, dispatcher),
        )
        terms = layer_activations(config, layer_pass)
        saved = sum(sum(one.values()) for one in found)
        assert saved == len(found) * sum(terms.values()), run
        if layout.ep > 1 or plan is not EXPERT_PLANS[0]:
            continue
        for one in found:  # then no part differs between ranks
            parts = by_part(one)
            assert parts["mlp"] == terms["mlp"], run
            assert parts["mlp.experts"] == terms["mlp.experts"], run
            # The router or the shared expert saves the input of the layer.
            rest = parts["mlp.router"] + parts.get("mlp.shared", 0)
            expected = terms["mlp.router"] + terms["mlp.shared"] + terms.get("mlp.up", 0)
            assert rest == expected, run


def experts_on_a_rank(mesh: Mesh, runs: list[Any]) -> list[dict[str, int]]:
    return [
        counted(config, dtype, plan, False, mesh, cut, dispatcher)
        for config, dtype, plan, cut, dispatcher in runs
    ]
