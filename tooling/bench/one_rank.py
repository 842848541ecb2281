"""Measures the overhead of megatron-train on one rank: its whole loop against plain PyTorch.

All variants train the same GPT from the same weights on the same batches, eagerly, in fp32. Two
are written by hand: for each micro-batch loss and backward, then `torch.nn.utils.clip_grad_norm_`,
`torch.optim.AdamW(fused=True)` with two groups, `zero_grad`. "plain" uses torch's modules
(`nn.Linear`, `nn.Embedding`, `cross_entropy`), "bare" the model of megatron_models with its
tensor-parallel layers. Ours is `Trainer.run` with everything on: task, step engine, pipeline loop,
gradient buffers, optimizer, schedules, reports, and callbacks that print and record every step.
"sharded" adds buffers, hooks and gathers of the distributed optimizer, although one rank shares
with no other.

Steps alternate: the iterator that yields a trainer's next batch runs the steps of the other
variants. So a step of ours includes everything from one batch to the next, callbacks too. The order
is reversed from step to step. CPU seconds are those of all threads; other load on the machine
affects them less.

    OMP_NUM_THREADS=1 python tooling/bench/one_rank.py [--rounds 45]
"""

import argparse
import io
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from megatron_models import GPT, GPTConfig, parameter_count
from megatron_optim import LearningRateSchedule, Optimizer, OptimizerConfig, WeightDecaySchedule
from megatron_parallel import DataParallelConfig, Mesh
from megatron_train import Callback, GPTTask, MicroBatch, StepEngine, StepReport, Trainer
from megatron_train.callbacks.log_line import LogLine
from megatron_train.callbacks.recording import Recorder, TensorBoard
from megatron_train.callbacks.stopping import StopAt
from megatron_train.metrics.console import Console
from plain_gpt import plain_copy
from torch import Tensor, nn

LEARNING_RATE, WEIGHT_DECAY, BETAS, EPSILON, CLIP = 3e-4, 0.01, (0.9, 0.95), 1e-8, 1.0
WARM_UP = 3  # rounds that are not counted
WAYS = {
    "whole": DataParallelConfig(),
    "sharded": DataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True),
}
"""What a data-parallel rank holds; each variant runs in a contest of its own."""

StepByHand = Callable[[Sequence[MicroBatch]], float]


class Times(NamedTuple):
    """Seconds of a step."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> "Times":
        return cls(time.perf_counter(), time.process_time())

    def until(self, end: "Times") -> "Times":
        return Times(end.wall - self.wall, end.cpu - self.cpu)


def by_hand(model: nn.Module, loss: Callable[[Mapping[str, Tensor]], Tensor]) -> StepByHand:
    """Runs the loop that one would write by hand; `loss` is the sum over the tokens of a
    micro-batch.
    """
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, fused=True)

    def step(batches: Sequence[MicroBatch]) -> float:
        tokens = sum(batch.tokens for batch in batches)
        total = 0.0
        for batch in batches:
            part = loss(batch.fields) / tokens
            part.backward()
            total += part.item()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def plain_step(config: GPTConfig) -> StepByHand:
    """Returns the step of torch's own modules."""
    model = plain_copy(GPT(config, Mesh.single()))
    return by_hand(model, lambda f: model(f["tokens"], f["labels"], reduction="sum"))


def bare_step(config: GPTConfig) -> StepByHand:
    """Returns the step of the model of megatron_models."""
    model = GPT(config, Mesh.single())
    return by_hand(model, lambda f: model.loss(f["tokens"], f["labels"]).sum())


class Losses(Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.all: list[float] = []

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        self.all.append(report.losses["lm loss"])


class Contest:
    """Runs all variants, alternating step by step.

    Attributes:
        times: Of every step, by variant: `plain`, `bare` and `ours`.
        losses: Of every step, by variant.
    """

    def __init__(
        self,
        config: GPTConfig,
        data_parallel: DataParallelConfig,
        batches: list[list[MicroBatch]],
        folder: Path,
    ) -> None:
        self._batches = batches
        self._by_hand = {"plain": plain_step(config), "bare": bare_step(config)}
        self._seen = Losses()
        self.times: dict[str, list[Times]] = {"plain": [], "bare": [], "ours": []}
        self.losses: dict[str, list[float]] = {"plain": [], "bare": [], "ours": self._seen.all}
        mesh = Mesh.single()
        engine = StepEngine(GPTTask([GPT(config, mesh)], None), mesh, data_parallel)
        settings = OptimizerConfig(
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_eps=EPSILON,
            clip_grad=CLIP,
        )
        samples = sum(batch.samples for step in batches for batch in step)
        self._trainer = Trainer(
            engine=engine,
            optimizer=Optimizer(engine.stages, settings),
            learning_rate=LearningRateSchedule(
                max_lr=LEARNING_RATE, decay_samples=samples, decay_style="constant"
            ),
            weight_decay=WeightDecaySchedule(start=WEIGHT_DECAY, end=WEIGHT_DECAY, samples=samples),
            micro_batches=self._turns,
            train_iters=len(batches),
            check_for_nan=True,
            callbacks=[
                LogLine(Console(io.StringIO()), 1, peak=None, throughput=True),
                Recorder(folder, {}),
                TensorBoard(folder, 1),
                StopAt(None, 60.0),
                self._seen,
            ],
        )

    def run(self) -> None:
        """Trains all variants on every batch."""
        self._trainer.run()

    def _turns(self, consumed: int) -> Iterator[list[MicroBatch]]:
        """Yields the trainer's batches; runs the steps by hand before or after its own."""
        for number, batches in enumerate(self._batches):
            if number % 2 == 0:
                self._steps_by_hand(batches, ("plain", "bare"))
            start = Times.now()
            yield batches
            self.times["ours"].append(start.until(Times.now()))
            if number % 2:
                self._steps_by_hand(batches, ("bare", "plain"))

    def _steps_by_hand(self, batches: list[MicroBatch], ways: Sequence[str]) -> None:
        for way in ways:
            start = Times.now()
            loss = self._by_hand[way](batches)
            self.times[way].append(start.until(Times.now()))
            self.losses[way].append(loss)


def make_batches(args: argparse.Namespace) -> list[list[MicroBatch]]:
    """Returns the micro-batches of every step, with one more round, as the last is never timed."""
    generator = torch.Generator().manual_seed(0)
    shape = (args.micro_batch_size, args.sequence_length + 1)
    ones = torch.ones(args.micro_batch_size, args.sequence_length)
    steps = []
    for _ in range(WARM_UP + args.rounds + 1):
        texts = [
            torch.randint(args.vocab_size, shape, generator=generator)
            for _ in range(args.micro_batches)
        ]
        fields = [
            {"tokens": t[:, :-1], "labels": t[:, 1:], "loss_mask": ones.clone()} for t in texts
        ]
        steps.append([MicroBatch.from_fields(one, token_field="tokens") for one in fields])
    return steps


def compare(way: str, contest: Contest, rounds: int) -> tuple[list[str], bool]:
    """Returns the rows of the table, and whether all variants have trained the same model."""
    counted = slice(WARM_UP, WARM_UP + rounds)
    rows = []
    for clock in Times._fields:
        taken = {
            name: [getattr(step, clock) for step in steps[counted]]
            for name, steps in contest.times.items()
        }
        medians = [f"{statistics.median(steps) * 1e3:.1f}" for steps in taken.values()]
        for other in ("plain", "bare"):
            ratios = [a / b for a, b in zip(taken["ours"], taken[other], strict=True)]
            low, ratio, high = statistics.quantiles(ratios, n=4)
            medians.append(f"{ratio:.3f} ({low:.3f} to {high:.3f})")
        rows.append(f"| {way} | {clock} | {' | '.join(medians)} |")
    steps = zip(*contest.losses.values(), strict=False)
    difference = max(max(losses) - min(losses) for losses in steps)
    print(f"{way}: losses of all steps differ by at most {difference:.1e}")
    return rows, difference < 1e-4


def main() -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=2560)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=31, help="steps of each way that count")
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
        f" {torch.get_num_threads()} threads, {platform.machine()}; medians of {args.rounds} rounds"
    )
    rows, equal = [], True
    for way, data_parallel in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            contest = Contest(config, data_parallel, make_batches(args), Path(folder))
            contest.run()
        found, same = compare(way, contest, args.rounds)
        rows += found
        equal = equal and same
    print("| ours | clock | plain, ms | bare, ms | ours, ms | ours / plain | ours / bare |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    if not equal:
        print("they did not train the same model; the numbers above mean nothing")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
