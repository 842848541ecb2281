"""Training steps of GPT and Llama on one rank: ours, and those of the peers, in one run.

Ours are driven by the step engine, as in megatron-train, eagerly and compiled (``--compile``).
Peers are a loop written by hand with torch's own modules (eager and compiled), the models of
transformers with SDPA, and megatron-core's models with their local modules and SDPA. Peers clip
with ``clip_grad_norm_(foreach=True)`` and update with ``AdamW(fused=True)``. In bf16, every variant
has fp32 main parameters. Rounds are interleaved, and the table has medians.

    python tooling/bench/peers.py [--rounds 9] [--models gpt-14m llama-14m] [--threads 1 2]

transformers and megatron-core are measured if they are installed.
"""

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron_models import GPT, GPTConfig, Placement, parameter_count, training_flops
from megatron_optim import Optimizer, OptimizerConfig
from megatron_parallel import Mesh
from megatron_train import GPTTask, MicroBatch, StepEngine
from plain_gpt import plain_copy
from plain_llama import plain_llama
from torch import Tensor, distributed, nn
from torch.nn import functional

sys.path.append(str(Path(__file__).parents[1]))
from megatron_names import name_in_megatron

LEARNING_RATE, WEIGHT_DECAY, BETAS, EPSILON, CLIP = 3e-4, 0.01, (0.9, 0.95), 1e-8, 1.0
SMALL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "make_vocab_size_divisible_by": 1,
}
LARGE: dict[str, Any] = SMALL | {
    "num_layers": 6,
    "hidden_size": 384,
    "num_attention_heads": 6,
    "vocab_size": 8192,
    "max_position_embeddings": 256,
}
LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
MODELS = {
    "gpt-0.9m": GPTConfig(**SMALL),
    "gpt-14m": GPTConfig(**LARGE),
    "llama-0.9m": GPTConfig(**SMALL, **LLAMA, ffn_hidden_size=352),
    "llama-14m": GPTConfig(**LARGE, **LLAMA, ffn_hidden_size=1024),
}
TOKENS = 1024
"""Tokens of a step, in one micro-batch."""

Step = Callable[[MicroBatch], float]
Losses = Callable[[Tensor, Tensor], Tensor]


def by_hand(model: nn.Module, loss: Losses) -> Step:
    """Returns the loop that one would write by hand; ``loss`` is a mean over tokens."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    full = all(p.dtype == torch.float32 for p in parameters)
    mains = parameters if full else [nn.Parameter(p.detach().float()) for p in parameters]
    groups = [
        {"params": [p for p in mains if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in mains if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, fused=True)

    def step(batch: MicroBatch) -> float:
        value = loss(batch.fields["tokens"], batch.fields["labels"])
        value.backward()
        if not full:
            for main, parameter in zip(mains, parameters, strict=True):
                main.grad = parameter.grad.float()  # type: ignore[union-attr]
                parameter.grad = None
        nn.utils.clip_grad_norm_(mains, CLIP, foreach=True)
        optimizer.step()
        if not full:
            with torch.no_grad():
                torch._foreach_copy_(parameters, mains)
        optimizer.zero_grad(set_to_none=True)
        return value.item()

    return step


def plain(ours: GPT, *, compiled: bool) -> Step:
    """Returns the step of torch's own modules, with the weights of our model."""
    rotary = ours.config.position_embedding_type == "rope"
    model = plain_llama(ours) if rotary else plain_copy(ours)
    return by_hand(model, torch.compile(model, dynamic=False) if compiled else model)


def engine(ours: GPT, *, compiled: bool) -> Step:
    """Returns the step of the step engine, with a copy of our model."""
    mesh = Mesh.single()
    model = GPT(ours.config, Placement(mesh, dtype=ours.embedding.word.weight.dtype))
    model.load_state_dict(ours.state_dict())
    driver = StepEngine(GPTTask([model], None), mesh, compile=compiled)
    settings = OptimizerConfig(
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=EPSILON,
        clip_grad=CLIP,
    )
    optimizer, number = Optimizer(driver.stages, settings), 0

    def step(batch: MicroBatch) -> float:
        nonlocal number
        number += 1
        denominators = driver.denominators([batch])
        sums = driver.run([batch], denominators, number)
        optimizer.step(LEARNING_RATE)
        optimizer.zero_grad()
        return float(sums["lm loss"] / denominators["lm loss"])

    return step


def hugging_face(ours: GPT) -> Step:
    """Returns the step of the model of transformers, with weights of its own."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    config = ours.config
    model: Any
    if config.position_embedding_type == "rope":
        settings = LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.norm_epsilon,
            attn_implementation="sdpa",
            use_cache=False,
        )
        model = LlamaForCausalLM(settings)
    else:
        settings = GPT2Config(
            vocab_size=config.vocab_size,
            n_embd=config.hidden_size,
            n_layer=config.num_layers,
            n_head=config.num_attention_heads,
            n_positions=config.max_position_embeddings,
            n_inner=config.ffn_hidden_size,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="sdpa",
            use_cache=False,
        )
        model = GPT2LMHeadModel(settings)
    require_size(model, ours)
    model = model.to(ours.embedding.word.weight.dtype)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model(input_ids=tokens).logits.flatten(0, 1)
        return functional.cross_entropy(logits.float(), labels.flatten())

    return by_hand(model, loss)


def megatron_core(ours: GPT) -> Step:
    """Returns the step of megatron-core's model with local modules and SDPA."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config, dtype = ours.config, ours.embedding.word.weight.dtype
    rotary = config.position_embedding_type == "rope"
    settings = TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        normalization="RMSNorm" if rotary else "LayerNorm",
        layernorm_epsilon=config.norm_epsilon,
        gated_linear_unit=rotary,
        activation_func=functional.silu if rotary else functional.gelu,
        add_bias_linear=not rotary,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization=settings.normalization)
    spec.submodules.self_attention.submodules.core_attention = SDPA
    model = GPTModel(
        settings,
        spec,
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="rope" if rotary else "learned_absolute",
        share_embeddings_and_output_weights=not rotary,
    )
    require_size(model, ours)
    found = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            other = found[name_in_megatron(name)]
            other.copy_(parameter.view(other.shape))
    model = model.to(dtype)
    length = config.max_position_embeddings
    positions = torch.arange(length).expand(TOKENS // length, -1)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = model(tokens, positions, None, labels=labels)
        return found.mean()

    return by_hand(model, loss)


class SDPA(nn.Module):
    """torch's attention in the place of megatron-core's core attention."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> Tensor:
        """Returns causal attention `[s, b, n * d]` of `[s, b, n, d]`."""
        q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.permute(2, 0, 1, 3).flatten(2)


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Makes megatron-core's models run on a CPU, in a job of one process."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs, gpt_model  # noqa: F401

    tracker = SimpleNamespace(fork=lambda *names: nullcontext(), add=lambda *seed: None)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.set_device = lambda device: None
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and hasattr(module, "get_cuda_rng_tracker"):
            module.get_cuda_rng_tracker = lambda *options: tracker  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel()
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            distributed.destroy_process_group()


def require_size(model: nn.Module, ours: GPT) -> None:
    """Raises an error unless a peer has as many parameters as our model."""
    found = sum(parameter.numel() for parameter in model.parameters())
    if found != (own := parameter_count(ours.config)):
        raise RuntimeError(f"{type(model).__name__} has {found} parameters, ours {own}")


def variants(ours: GPT) -> dict[str, Step]:
    """Returns all variants by name."""
    ways: dict[str, Callable[[GPT], Step]] = {
        "plain": partial(plain, compiled=False),
        "plain, compiled": partial(plain, compiled=True),
    }
    if find_spec("transformers") is not None:
        ways["transformers"] = hugging_face
    if distributed.is_initialized():
        ways["megatron-core"] = megatron_core
    ways["ours"] = partial(engine, compiled=False)
    ways["ours, compiled"] = partial(engine, compiled=True)
    return {name: way(ours) for name, way in ways.items()}


def batches(config: GPTConfig, count: int) -> list[MicroBatch]:
    """Returns random micro-batches."""
    generator = torch.Generator().manual_seed(0)
    length = config.max_position_embeddings
    shape = (TOKENS // length, length + 1)
    texts = [torch.randint(config.vocab_size, shape, generator=generator) for _ in range(count)]
    ones = torch.ones(shape[0], length)
    return [
        MicroBatch.from_fields(
            {
                "tokens": text[:, :-1].contiguous(),
                "labels": text[:, 1:].contiguous(),
                "loss_mask": ones.clone(),
            },
            token_field="tokens",
        )
        for text in texts
    ]


def measure(
    steps: dict[str, Step], rounds: Sequence[Sequence[MicroBatch]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the median seconds of a step and the last loss of each variant.

    The first round warms up and compiles.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses = dict.fromkeys(steps, 0.0)
    names = list(steps)
    for given in rounds:
        for name in names:
            start = time.perf_counter()
            for batch in given:
                losses[name] = steps[name](batch)
            times[name].append((time.perf_counter() - start) / len(given))
        names = [*names[1:], names[0]]
    return {name: statistics.median(found[1:]) for name, found in times.items()}, losses


def peak(dtype: torch.dtype, repeats: int = 9) -> float:
    """Returns the FLOP/s of a matrix product of 2,048 x 2,048 x 2,048."""
    a, b = (torch.randn(2048, 2048, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return 2 * 2048**3 / statistics.median(times)


def row(name: str, dtype: torch.dtype, threads: int, rounds: int, steps: int) -> bool:
    """Prints the rows of one model; returns whether the losses of equal weights are equal."""
    config = MODELS[name]
    torch.set_num_threads(threads)
    torch.compiler.reset()
    torch.manual_seed(0)
    ours = GPT(config, Placement(Mesh.single(), dtype=dtype))
    drawn = batches(config, (rounds + 1) * steps)
    given = [drawn[i * steps : (i + 1) * steps] for i in range(rounds + 1)]
    medians, losses = measure(variants(ours), given)
    best = min(value for way, value in medians.items() if not way.startswith("ours"))
    flops = training_flops(config, config.max_position_embeddings, TOKENS)
    bound = peak(dtype)
    label = "bf16" if dtype == torch.bfloat16 else "fp32"
    for way, median in medians.items():
        print(
            f"| {name} | {label} | {threads} | {way} | {median * 1e3:.1f} | {TOKENS / median:,.0f} "
            f"| {flops / median / bound:.0%} | {best / median:.2f} |",
            flush=True,
        )
    same = [loss for way, loss in losses.items() if way != "transformers"]
    return max(same) - min(same) < (1e-3 if dtype == torch.float32 else 0.05)


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count, after one more")
    parser.add_argument("--steps", type=int, default=2, help="steps of a variant in a round")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {platform.machine()}, {TOKENS} tokens a step\n")
    print(
        "| model | dtype | threads | variant | ms | tokens/s | of matmul peak | best peer / this |"
    )
    print("|---|---|---:|---|---:|---:|---:|---:|")
    equal = []
    with megatron_on_cpu() if find_spec("megatron") is not None else nullcontext():
        for name in args.models:
            for dtype in args.dtypes:
                kind = torch.bfloat16 if dtype == "bf16" else torch.float32
                for threads in args.threads:
                    equal.append(row(name, kind, threads, args.rounds, args.steps))
    if not all(equal):
        print("they did not train the same model; the numbers above mean nothing")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
