"""The formula of saved activations equals what a step on an imagined GPU keeps, by backends.

The device has to be imagined before torch is imported, so the counts come from another process.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from megatron_models import GPTConfig, LowPrecisionConfig, operations_of, training_memory
from megatron_models.fused_operations import FUSED, ON_CUDA
from megatron_parallel import ParallelLayout

LENGTH, SAMPLES = 256, 2

COUNTED = f"""
import json, sys
from megatron_parallel.imagined import NoGuardError, load_guard

try:
    load_guard()
except NoGuardError as error:
    sys.exit(f"no simulated device: {{error}}")
import torch
from megatron_models import (
    GPT, Dropout, GPTConfig, LowPrecisionConfig, Placement, low_precision_placement
)
from megatron_parallel import DropoutKey, Mesh, ParallelLayout
from megatron_parallel.imagined import imagined_device

found = []
for settings, tp, backends, attention, few in json.load(sys.stdin):
    layout, config = ParallelLayout(tp=tp, dp=1), GPTConfig(**settings)
    with (
        Mesh.imagined(layout, 0, device="cuda") as mesh,
        imagined_device("cuda") as ledger,
    ):
        placement = Placement(mesh, torch.bfloat16, sequence_parallel=tp > 1, backends=backends)
        few = LowPrecisionConfig(**few)
        model = GPT(config, low_precision_placement(config, few, placement))
        tokens = torch.zeros({SAMPLES}, {LENGTH}, dtype=torch.int64, device=mesh.device)
        samples = torch.arange({SAMPLES}, device=mesh.device)
        key = DropoutKey.for_batch(seed=1, iteration=0, samples=samples, positions={LENGTH})
        dropout = Dropout(key, hidden=0.0, attention=attention) if attention else None
        before = sum(ledger.storages.by_part().values())
        losses = model(tokens, labels=tokens, dropout=dropout)
        found.append(sum(ledger.storages.by_part().values()) - before)
print(json.dumps(found))
"""

SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "ffn_hidden_size": 1024,
    "vocab_size": 1024,
    "max_position_embeddings": LENGTH,
}
LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "activation": "swiglu",
    "add_bias_linear": False,
    "num_query_groups": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": LLAMA,
    "bounded logits": {"final_logit_softcapping": 30.0},
    "norms of queries and keys": LLAMA | {"qk_layernorm": True},
}
REFERENCE = {"attention": "reference"}

SCORES: list[dict[str, Any]] = [
    {"attn_logit_softcapping": 20.0},
    {"softmax_type": "learnable"},
    {"position_embedding_type": "alibi"},
]


FEW: dict[str, dict[str, Any]] = {
    "tensorwise": {"fp8_format": "e4m3", "fp8_recipe": "tensorwise"},
    "delayed": {"fp8_format": "hybrid", "first_last_layers_bf16": True},
    "mxfp8": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    "wgrad in bf16": {"fp8_format": "e4m3", "fp8_wgrad": False},
}
DEEPSEEK: dict[str, Any] = {name: LLAMA[name] for name in LLAMA if name != "num_query_groups"} | {
    "multi_latent_attention": True,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_head_dim": 64,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 64,
}


def cases() -> Iterator[tuple[str, dict[str, Any], int, dict[str, str], float, dict[str, Any]]]:
    for name, changes in MODELS.items():
        operations = operations_of(GPTConfig(num_layers=1, **SIZES, **changes))
        fused = {op: "triton" for op in operations if op in FUSED}
        for tp in (1, 2):
            for how, backends in (("", {}), ("fused", fused), ("unfused attention", REFERENCE)):
                yield f"{name}, tp{tp}, {how}", changes, tp, backends, 0.0, {}
    yield "attention dropout", LLAMA, 1, {}, 0.1, {}
    yield "unfused attention with dropout", LLAMA, 1, REFERENCE, 0.1, {}
    for changes in SCORES:
        yield f"{changes}", changes, 1, {}, 0.0, {}
        yield f"unfused, {changes}", changes, 1, REFERENCE, 0.0, {}
    for name, few in FEW.items():
        for tp in (1, 2):
            yield f"{name}, tp{tp}", LLAMA, tp, {}, 0.0, few
    yield "tensorwise, latent attention", DEEPSEEK, 1, {}, 0.0, FEW["tensorwise"]


SAMPLE = {
    "gpt, tp2, fused",
    "llama, tp1, fused",
    "bounded logits, tp2, ",
    "norms of queries and keys, tp1, fused",
    "unfused attention with dropout",
    f"{SCORES[0]}",
    f"unfused, {SCORES[2]}",
    "tensorwise, tp2",
}


def test_the_sample_has_every_model_backend_and_score() -> None:
    assert {name for name, *_ in cases()} >= SAMPLE
    assert all(any(name.startswith(f"{model}, ") for name in SAMPLE) for model in MODELS)


@pytest.mark.parametrize("sample", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_activations_on_an_imagined_gpu_are_those_of_the_formula(sample: bool) -> None:
    chosen = [case for case in cases() if not sample or case[0] in SAMPLE]
    jobs = [
        ({"num_layers": layers, **SIZES, **changes}, tp, backends, dropout, few)
        for _, changes, tp, backends, dropout, few in chosen
        for layers in (3, 5)
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COUNTED],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        check=False,
    )
    if "no simulated device" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-4000:]
    counted = json.loads(done.stdout)
    for (name, *_), short, longer, job, job_of_more in zip(
        chosen, counted[::2], counted[1::2], jobs[::2], jobs[1::2], strict=True
    ):
        formula, more = of_formula(*job), of_formula(*job_of_more)
        # An allocation is a multiple of 512 bytes, and flash attention keeps two numbers. Each
        # linear layer in FP8 keeps up to three scalars.
        layers, scalars = job[0]["num_layers"], (8 * 3 * 512 if job[-1] else 0)
        assert abs((longer - short) - (more - formula)) <= 2 * (2048 + scalars), name
        assert abs(short - formula) <= 8192 + layers * scalars, name


def of_formula(
    settings: dict[str, Any],
    tp: int,
    backends: dict[str, str],
    attention_dropout: float,
    few: dict[str, Any],
) -> int:
    return training_memory(
        GPTConfig(**settings),
        LENGTH,
        SAMPLES,
        "bfloat16",
        layout=ParallelLayout(tp=tp, dp=1),
        sequence_parallel=tp > 1,
        backends=backends,
        attention_dropout=attention_dropout > 0,
        low_precision=LowPrecisionConfig(**few),
    ).activations


def test_estimates_know_which_operations_a_gpu_fuses_without_a_choice() -> None:
    from megatron_kernels import find_operation  # the formula itself needs no torch

    assert {name for name in FUSED if find_operation(name).automatic[0].fuses} == ON_CUDA
