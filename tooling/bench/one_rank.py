"""What megatron-train's layers cost on one rank: its whole loop against the bare model.

Both train the same GPT of megatron_models from the same weights on the same batches, eagerly, in
fp32. Bare is what one would write by hand: for each micro-batch loss and backward, then
`torch.nn.utils.clip_grad_norm_`, `torch.optim.AdamW(fused=True)` with two groups, `zero_grad`. Ours
is `Trainer.run` with everything on: task, step engine, pipeline loop, gradient buffers, optimizer,
schedules, reports, and callbacks that print and record every step.

Steps alternate: the iterator that hands the trainer its next batch makes the bare step in between,
so a step of ours is all that happens from one batch to the next, callbacks too. Which of the two
comes first changes from pair to pair. CPU seconds are those of all threads; they suffer less from
what else the machine does.

    OMP_NUM_THREADS=1 python tooling/bench/one_rank.py [--pairs 45] [--json out.json]
"""

import argparse
import io
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from megatron_models import GPT, GPTConfig, parameter_count
from megatron_optim import LearningRateSchedule, Optimizer, OptimizerConfig, WeightDecaySchedule
from megatron_parallel import Mesh
from megatron_train import Batch, Callback, GPTTask, StepEngine, StepReport, Trainer
from megatron_train.callbacks.log_line import LogLine
from megatron_train.callbacks.recording import Recorder, TensorBoard
from megatron_train.callbacks.stopping import StopAt
from megatron_train.metrics.console import Console
from torch import nn

LEARNING_RATE, WEIGHT_DECAY, BETAS, EPSILON, CLIP = 3e-4, 0.01, (0.9, 0.95), 1e-8, 1.0
WARM_UP = 3  # pairs that do not count
BareStep = Callable[[Sequence[Batch]], float]


class Times(NamedTuple):
    """Seconds of a step."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> "Times":
        return cls(time.perf_counter(), time.process_time())

    def until(self, end: "Times") -> "Times":
        return Times(end.wall - self.wall, end.cpu - self.cpu)


def bare_step(config: GPTConfig) -> BareStep:
    """The loop one would write by hand; returns the loss of a step."""
    model = GPT(config, Mesh.single())
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, fused=True)

    def step(batches: Sequence[Batch]) -> float:
        tokens = sum(batch["tokens"].numel() for batch in batches)
        total = 0.0
        for batch in batches:
            loss = model.loss(batch["tokens"], batch["labels"]).sum() / tokens
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


class Losses(Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.all: list[float] = []

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        self.all.append(report.losses["lm loss"])


class Duel:
    """Both ways, step by step in turns."""

    def __init__(self, config: GPTConfig, batches: list[list[Batch]], folder: Path) -> None:
        self.bare: list[Times] = []
        self.ours: list[Times] = []
        self.bare_losses: list[float] = []
        self.losses = Losses()
        self._batches = batches
        self._bare_step = bare_step(config)
        mesh = Mesh.single()
        engine = StepEngine(GPTTask([GPT(config, mesh)], None), mesh)
        settings = OptimizerConfig(
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_eps=EPSILON,
            clip_grad=CLIP,
        )
        samples = sum(len(batch["tokens"]) for step in batches for batch in step)
        self._trainer = Trainer(
            engine=engine,
            optimizer=Optimizer(
                engine.parameters, engine.table, mesh, settings, gradients=engine.gradients
            ),
            learning_rate=LearningRateSchedule(
                max_lr=LEARNING_RATE, decay_samples=samples, decay_style="constant"
            ),
            weight_decay=WeightDecaySchedule(start=WEIGHT_DECAY, end=WEIGHT_DECAY, samples=samples),
            steps=self._turns,
            train_iters=len(batches),
            callbacks=[
                LogLine(Console(io.StringIO()), 1, peak=None, throughput=True),
                Recorder(folder, {}),
                TensorBoard(folder, 1),
                StopAt(None, 60.0),
                self.losses,
            ],
        )

    def run(self) -> None:
        """Train on every batch both ways."""
        self._trainer.run()

    def _turns(self, consumed: int) -> Iterator[list[Batch]]:
        """Give the trainer its batches; make the bare step before or after its own."""
        for number, batches in enumerate(self._batches):
            if number % 2 == 0:
                self._bare(batches)
            start = Times.now()
            yield batches
            self.ours.append(start.until(Times.now()))
            if number % 2:
                self._bare(batches)

    def _bare(self, batches: list[Batch]) -> None:
        start = Times.now()
        loss = self._bare_step(batches)
        self.bare.append(start.until(Times.now()))
        self.bare_losses.append(loss)


def make_batches(args: argparse.Namespace) -> list[list[Batch]]:
    """The micro-batches of every step; one pair more than counts, as the last is never timed."""
    generator = torch.Generator().manual_seed(0)
    shape = (args.micro_batch_size, args.sequence_length + 1)
    ones = torch.ones(args.micro_batch_size, args.sequence_length)
    steps = []
    for _ in range(WARM_UP + args.pairs + 1):
        texts = [
            torch.randint(args.vocab_size, shape, generator=generator)
            for _ in range(args.micro_batches)
        ]
        steps.append(
            [{"tokens": t[:, :-1], "labels": t[:, 1:], "loss_mask": ones.clone()} for t in texts]
        )
    return steps


def report(bare: list[Times], ours: list[Times]) -> dict[str, dict[str, float]]:
    """Print the table and return its content."""
    result = {}
    print("| clock | bare, ms | ours, ms | ours / bare | middle half of the pairs |")
    print("|---|---|---|---|---|")
    for clock in Times._fields:
        a = [getattr(step, clock) for step in bare]
        b = [getattr(step, clock) for step in ours]
        ratios = [after / before for before, after in zip(a, b, strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        medians = [statistics.median(a) * 1e3, statistics.median(b) * 1e3]
        result[clock] = {"bare_ms": medians[0], "ours_ms": medians[1], "ratio": ratio}
        result[clock] |= {"low": low, "high": high}
        print(
            f"| {clock} | {medians[0]:.1f} | {medians[1]:.1f} | {ratio:.3f} "
            f"| {low:.3f} to {high:.3f} |"
        )
    return result


def main() -> int:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=2560)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=31, help="steps of each way that count")
    parser.add_argument("--json", type=Path, help="also write the result here")
    args = parser.parse_args()
    config = GPTConfig(
        num_layers=args.layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.heads,
        vocab_size=args.vocab_size,
        max_position_embeddings=args.sequence_length,
    )
    print(
        f"{parameter_count(config):,} parameters, {args.micro_batches} micro-batches of "
        f"{args.micro_batch_size} x {args.sequence_length} tokens, fp32; torch {torch.__version__},"
        f" {torch.get_num_threads()} threads, {platform.machine()}; median of {args.pairs} pairs"
    )
    with tempfile.TemporaryDirectory() as folder:
        duel = Duel(config, make_batches(args), Path(folder))
        duel.run()
    counted = slice(WARM_UP, WARM_UP + args.pairs)
    result = report(duel.bare[counted], duel.ours[counted])
    pairs = list(zip(duel.bare_losses, duel.losses.all, strict=False))
    difference = max(abs(a - b) for a, b in pairs)
    print(f"last losses: bare {pairs[-1][0]:.6f}, ours {pairs[-1][1]:.6f}")
    print(f"losses of {len(pairs)} steps differ by at most {difference:.1e}")
    if difference > 1e-4:
        print("they did not train the same model; the numbers above mean nothing")
        return 1
    if args.json:
        details = {"arguments": {k: str(v) for k, v in vars(args).items()}}
        args.json.write_text(json.dumps({**result, **details}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
