"""Training step on one rank: our GPT compared with a hand-written PyTorch loop of the same model.

Both train the same weights on the same batches with fp32, fused AdamW, SDPA and gradient clipping,
eagerly and compiled. Rounds are interleaved (one of each variant in turn), the table has medians of
rounds, and the baseline is the faster of the peer's two variants. The benchmark compares losses to
check that both do the same work.

    python tooling/bench/train_step.py [--vocab-size 4096] [--rounds 9] [--json out.json]
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from megatron_models import GPT, GPTConfig, training_flops
from megatron_optim import Optimizer, OptimizerConfig
from megatron_parallel import Mesh, TrainableParameters, collect_shardings
from plain_gpt import PlainGPT, plain_copy
from torch import Tensor, nn

LEARNING_RATE, WEIGHT_DECAY, BETAS, EPSILON, CLIP = 3e-4, 0.01, (0.9, 0.95), 1e-8, 1.0
Step = Callable[[Tensor, Tensor], Tensor]


def plain_step(model: PlainGPT, compiled: bool) -> Step:
    """Returns the peer's training step."""
    decay = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, fused=True)
    forward = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = forward(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def our_step(model: GPT, mesh: Mesh, compiled: bool) -> Step:
    """Returns our training step: the model's loss and the optimizer of megatron-optim."""
    settings = OptimizerConfig(
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=EPSILON,
        clip_grad=CLIP,
    )
    table = collect_shardings(model)
    optimizer = Optimizer(TrainableParameters(model.named_parameters(), table, mesh), settings)
    forward = torch.compile(model.loss, fullgraph=True, dynamic=False) if compiled else model.loss

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = forward(tokens, labels).mean()
        loss.backward()
        optimizer.step(LEARNING_RATE)
        optimizer.zero_grad()
        return loss.detach()

    return step


def make_steps(config: GPTConfig) -> dict[str, Step]:
    """Returns the four variants, which start from the same weights."""
    steps = {}
    for mode in ("eager", "compiled"):
        mesh = Mesh.single()
        model = GPT(config, mesh)
        steps[f"plain {mode}"] = plain_step(plain_copy(model), mode == "compiled")
        steps[f"ours {mode}"] = our_step(model, mesh, mode == "compiled")
    return steps


def measure(
    steps: dict[str, Step], batches: list[tuple[Tensor, Tensor]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Returns the seconds per step of each round, and the last loss, by variant."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses = {}
    names = list(steps)
    for index in range(rounds + 1):
        for name in names:
            start = time.perf_counter()
            for batch in batches:
                loss = steps[name](*batch)
            losses[name] = loss.item()
            if index:  # the first round warms up and compiles
                seconds[name].append((time.perf_counter() - start) / len(batches))
        names = names[1:] + names[:1]
    return seconds, losses


def report(config: GPTConfig, tokens: int, length: int, steps: dict[str, list[float]]) -> dict:
    """Prints the table and returns its content."""
    medians = {name: statistics.median(values) for name, values in steps.items()}
    baseline = min((name for name in medians if name.startswith("plain")), key=medians.__getitem__)
    best = min((name for name in medians if name.startswith("ours")), key=medians.__getitem__)
    flops = training_flops(config, length, tokens)
    print(
        f"{'variant':<16} {'ms/step':>9} {'spread':>8} {'tokens/s':>10} {'GFLOP/s':>8} {'ratio':>7}"
    )
    for name, median in medians.items():
        spread = (max(steps[name]) - min(steps[name])) / median
        print(
            f"{name:<16} {median * 1e3:9.1f} {spread:8.1%} {tokens / median:10.0f} "
            f"{flops / median / 1e9:8.1f} {medians[baseline] / median:7.3f}"
        )
    ratio = medians[baseline] / medians[best]
    print(f"ours ({best}) / baseline ({baseline}): {ratio:.3f}")
    return {"median_seconds": medians, "baseline": baseline, "best": best, "ratio": ratio}


def main() -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=4, help="steps a round")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count, after one more")
    parser.add_argument("--json", type=Path, help="also write the result here")
    args = parser.parse_args()
    config = GPTConfig(
        num_layers=args.layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.heads,
        vocab_size=args.vocab_size,
        max_position_embeddings=args.sequence_length,
    )
    torch.manual_seed(0)
    shape = (args.micro_batch_size, args.sequence_length + 1)
    texts = [torch.randint(args.vocab_size, shape) for _ in range(args.steps)]
    batches = [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in texts]
    print(
        f"{args.layers} layers x {args.hidden_size}, {args.heads} heads, vocabulary "
        f"{args.vocab_size}, {args.micro_batch_size} x {args.sequence_length} tokens, fp32; torch "
        f"{torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}; median of "
        f"{args.rounds} rounds of {args.steps} steps"
    )
    seconds, losses = measure(make_steps(config), batches, args.rounds)
    tokens = args.micro_batch_size * args.sequence_length
    result = report(config, tokens, args.sequence_length, seconds)
    print("last losses: " + ", ".join(f"{name} {loss:.5f}" for name, loss in losses.items()))
    if max(losses.values()) - min(losses.values()) > 1e-3:
        print("the variants did not train the same model; the numbers above mean nothing")
        return 1
    if args.json:
        details = {"arguments": {k: str(v) for k, v in vars(args).items()}, "losses": losses}
        args.json.write_text(json.dumps({**result, **details, "seconds": seconds}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
