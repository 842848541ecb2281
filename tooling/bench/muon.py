"""Muon and AdamW at equal steps: losses of the quickstart's model on the quickstart's corpus.

    python tooling/bench/muon.py [--steps 400] [--seeds 3] [--picture docs/images/muon.png]

Both rules get the same number of trials: one for each learning rate of `RATES`, with a seed of
their own. The best rate of each then trains with other seeds, which draw weights and batches. The
loss is that of the validation text, in nats per token. The picture has the mean over these seeds.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import torch
from megatron_data import read_texts, train_bpe
from megatron_models import GPT, GPTConfig
from megatron_optim import LearningRateSchedule, MuonSettings, Optimizer, OptimizerConfig
from megatron_parallel import Mesh, TrainableParameters, collect_shardings
from torch import Tensor

CORPUS = Path(__file__).parents[2] / "corpus"
SEQUENCE, BATCH, VOCABULARY = 128, 4, 2048
RATES = (2e-3, 4e-3, 8e-3, 16e-3, 32e-3)
TRIAL_SEED = 100
POINTS = 10
"""Number of evaluations of a run."""
COMMON = {"weight_decay": 0.1, "adam_beta2": 0.95}
RULES = {
    "AdamW": OptimizerConfig(**COMMON),
    "Muon": OptimizerConfig(
        optimizer="muon",
        settings=MuonSettings(nesterov=True, scale_mode="match_rms_adamw"),
        **COMMON,
    ),
}
Curve = list[tuple[int, float]]
"""Steps and validation losses."""


def model_config(vocabulary: int) -> GPTConfig:
    """Returns the model of `nox -s quickstart`."""
    return GPTConfig(
        num_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        vocab_size=vocabulary,
        max_position_embeddings=SEQUENCE,
        position_embedding_type="rope",
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=False,
    )


def texts() -> tuple[Tensor, Tensor, int]:
    """Returns the tokens of training and validation text `[n]`, and the size of the vocabulary."""
    files = [CORPUS / "moby_dick.jsonl", CORPUS / "state_of_the_union_small.jsonl"]
    tokenizer = train_bpe(read_texts([files[0]]), VOCABULARY)
    training, validation = (
        torch.tensor([token for text in read_texts([file]) for token in tokenizer.encode(text)])
        for file in files
    )
    return training, validation, tokenizer.vocab_size


def batches(tokens: Tensor, seed: int) -> Iterator[Tensor]:
    """Yields rows of a batch `[BATCH, SEQUENCE + 1]` from random positions."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - SEQUENCE, (BATCH, 1), generator=generator)
        yield tokens[starts + torch.arange(SEQUENCE + 1)]


@torch.no_grad()
def evaluate(model: GPT, tokens: Tensor, rows: int) -> float:
    """Returns the mean loss of some rows of the validation text, evenly spaced."""
    whole = tokens[: (len(tokens) - 1) // SEQUENCE * SEQUENCE + 1]
    windows = whole.unfold(0, SEQUENCE + 1, SEQUENCE)
    chosen = windows[:: max(1, len(windows) // rows)].split(16)
    losses = [model(part[:, :-1], labels=part[:, 1:]).flatten() for part in chosen]
    return float(torch.cat(losses).mean())


def train(rule: str, lr: float, seed: int, steps: int, data: tuple[Tensor, Tensor, int]) -> Curve:
    """Returns the validation losses of one run."""
    training, validation, vocabulary = data
    mesh = Mesh.single()
    model = GPT(model_config(vocabulary), mesh, seed=1234 + seed)
    table = collect_shardings(model)
    optimizer = Optimizer(TrainableParameters(model.named_parameters(), table, mesh), RULES[rule])
    schedule = LearningRateSchedule(
        max_lr=lr, min_lr=lr / 10, warmup_samples=steps // 8, decay_samples=steps
    )
    rows, curve = batches(training, seed), []
    for step in range(1, steps + 1):
        batch = next(rows)
        model(batch[:, :-1], labels=batch[:, 1:]).mean().backward()
        optimizer.step(schedule.at(step))
        optimizer.zero_grad()
        if step % max(1, steps // POINTS) == 0:
            curve.append((step, evaluate(model, validation, 400 if step == steps else 64)))
    return curve


def draw(means: dict[str, Curve], best: dict[str, float], path: Path) -> None:
    """Draws the mean loss of both rules by step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for rule, curve in means.items():
        label = f"{rule}, learning rate {best[rule]:g}: {curve[-1][1]:.3f}"
        axes.plot(*zip(*curve, strict=True), "o-", label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("validation loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(title="best of equally many trials, mean of three seeds")
    figure.savefig(path)


def main() -> None:
    """Runs trials and final runs, prints tables and draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data, steps = texts(), arguments.steps
    best: dict[str, float] = {}
    print(f"| trials, {steps} steps | {' | '.join(f'{lr:g}' for lr in RATES)} | best |")
    print("|---|" + "--:|" * (len(RATES) + 1))
    for rule in RULES:
        found = {lr: train(rule, lr, TRIAL_SEED, steps, data)[-1][1] for lr in RATES}
        best[rule] = min(found, key=found.__getitem__)
        cells = " | ".join(f"{loss:.3f}" for loss in found.values())
        print(f"| {rule} | {cells} | {best[rule]:g} |", flush=True)
    numbers = " | ".join(f"seed {seed}" for seed in range(arguments.seeds))
    print(f"\n| best rate | {numbers} | mean | CPU ms a step, with evaluations |")
    print("|---|" + "--:|" * (arguments.seeds + 2))
    means: dict[str, Curve] = {}
    for rule, lr in best.items():
        started = time.process_time()
        curves = [train(rule, lr, seed, steps, data) for seed in range(arguments.seeds)]
        milliseconds = (time.process_time() - started) * 1000 / steps / arguments.seeds
        points = zip(*curves, strict=True)
        means[rule] = [(point[0][0], fmean(loss for _, loss in point)) for point in points]
        cells = " | ".join(f"{curve[-1][1]:.3f}" for curve in curves)
        print(f"| {rule} | {cells} | {means[rule][-1][1]:.3f} | {milliseconds:.0f} |", flush=True)
    if arguments.picture is not None:
        draw(means, best, arguments.picture)
    if not means["Muon"][-1][1] < means["AdamW"][-1][1]:
        sys.exit("muon: error: the loss of Muon is not below that of AdamW")


if __name__ == "__main__":
    main()
