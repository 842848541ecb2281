"""Training steps of Llama and GPT on one GPU: ours, and a compiled loop written by hand.

Ours are whole steps of the trainer of megatron-train, from its command line, eagerly and compiled,
in bf16 and FP8. The peer is `plain_llama` or `plain_gpt` under torch.compile with bf16 weights,
fp32 main parameters, ``clip_grad_norm_(foreach=True)`` and ``AdamW(fused=True)``; with several
micro-batches it adds gradients in bf16, ours in fp32. A round runs some steps of each variant in
turn between two synchronisations, and the table has medians of rounds.

MFU divides the FLOPs of the model (`training_flops`: causal attention counts half of the square,
recomputation nothing) by the time and the peak of the data sheet (`PEAKS`). A product of two
matrices and a copy are measured in the same run. Memory is the largest that torch allocated in the
first rounds of a variant, beside what ``megatron-train dry-run`` predicts if ``--predicted`` names
a file of `--predict`, which needs no GPU but a C++ compiler.

    python tooling/bench/gpu_step.py --predict predicted.json
    python tooling/bench/gpu_step.py --predicted predicted.json [--models 125m] [--micro-batches 8]
"""

import argparse
import gc
import json
import math
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from megatron_models import GPT, training_flops
from megatron_parallel import Mesh
from megatron_train.assembly import build_trainer, choose_dtype
from megatron_train.cli.main import build_parser
from megatron_train.config.described_run import resolve_run
from megatron_train.config.run import RunConfig
from megatron_train.dry_run.rank import SameBatches, proof_batch
from megatron_train.tasks.kinds import find_task_kind
from megatron_train.tasks.task import MicroBatch
from megatron_train.trainer import Trainer
from plain_gpt import plain_copy
from plain_llama import plain_llama
from torch import nn
from torch.autograd import DeviceType

LEARNING_RATE, WEIGHT_DECAY, BETAS, EPSILON, CLIP = 3e-4, 0.01, (0.9, 0.95), 1e-8, 1.0
PEAKS = {"H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}
"""Dense bf16 FLOP/s of data sheets."""

LLAMA = (
    "--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights "
)
TRAINING = (
    "--attention-dropout 0 --hidden-dropout 0 --bf16 "
    f"--lr {LEARNING_RATE} --weight-decay {WEIGHT_DECAY} --clip-grad {CLIP} "
    f"--adam-beta1 {BETAS[0]} --adam-beta2 {BETAS[1]} --adam-eps {EPSILON} "
    "--world-size 1 --train-iters 1000000 "
)


class Model(NamedTuple):
    """A model and its batch.

    Attributes:
        flags: Flags of ``megatron-train pretrain gpt``.
        apart: Whether the peer and ours do not fit into memory together.
    """

    flags: str
    apart: bool = False

    def repeated(self, micro_batches: int) -> "Model":
        """Returns the model with this number of micro-batches in a step."""
        (samples,) = map(int, re.findall(r"--micro-batch-size (\d+)", self.flags))
        return self._replace(flags=f"{self.flags}--global-batch-size {samples * micro_batches} ")


def _flags(
    layers: int, hidden: int, heads: int, ffn: int, vocabulary: int, length: int, samples: int
) -> str:
    return (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} "
        f"--ffn-hidden-size {ffn} --vocab-size {vocabulary} --seq-length {length} "
        f"--max-position-embeddings {length} --micro-batch-size {samples} "
        f"--global-batch-size {samples} " + TRAINING
    )


MODELS = {
    "125m": Model(LLAMA + _flags(12, 768, 12, 2048, 32000, 2048, 16)),
    "350m": Model(LLAMA + _flags(24, 1024, 16, 2816, 32000, 2048, 8)),
    "1.3b": Model(LLAMA + _flags(24, 2048, 16, 5504, 32000, 4096, 2)),
    "gpt, 125m": Model(_flags(12, 768, 12, 3072, 50257, 1024, 16)),
    "8b, 6 of 32 layers": Model(
        LLAMA
        + _flags(6, 4096, 32, 14336, 128256, 8192, 1)
        + "--group-query-attention --num-query-groups 8 ",
        apart=True,
    ),
}
BY_LAYER = "--compile --compile-scope layer "
FP8 = "--fp8-format hybrid --fp8-recipe tensorwise "
TRITON = (
    "--kernel-backends add_rms_norm=triton rms_norm=triton rope_qkv=triton swiglu=triton "
    "vocab_embedding=triton vocab_cross_entropy=triton "
)
OUR_ADAM = "--adam-kernels triton "
VARIANTS = {
    "ours": "",
    "ours, compiled": "--compile ",
    "ours, compiled, our Adam": "--compile " + OUR_ADAM,
    "ours, compiled by layer": BY_LAYER,
    "ours, compiled by layer, Triton kernels": BY_LAYER + TRITON + OUR_ADAM,
    "ours, fp8, compiled by layer": BY_LAYER + FP8,
}
PEER = "plain, compiled"

HEADER = (
    "| model | variant | ms | tokens/s | MFU | of the product | / plain | GiB | predicted |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|---:|"
)

Step = Callable[[], object]


def read_run(flags: str, command: str = "dry-run") -> RunConfig:
    """Returns the run of a command line."""
    return resolve_run(build_parser().parse_args([command, "gpt", *flags.split()]))


@contextmanager
def drawn_on_device() -> Iterator[None]:
    """Draws initial values on the device, since times do not depend on them."""

    def draw(parameter: torch.Tensor, init: Any, *_: object) -> None:
        parameter.normal_(0.0, init.scale)

    with patch("megatron_parallel.sharding.initialization._draw", draw):
        yield


def build_ours(run: RunConfig, mesh: Mesh, batch: MicroBatch) -> Trainer:
    """Returns the trainer of a run with equal micro-batches."""
    batches = SameBatches(batch, [micro_batches(run)] * run.train_iters)
    with drawn_on_device():
        return build_trainer(run, find_task_kind(run.task), batches, mesh, choose_dtype(run))


def micro_batches(run: RunConfig) -> int:
    """Returns the number of micro-batches of a step on one rank."""
    return run.training.global_batch_size // run.training.micro_batch_size


def our_step(trainer: Trainer) -> Step:
    """Returns one step of the trainer."""
    steps = trainer.micro_batches(0)
    return lambda: trainer.step(steps)


def plain_step(ours: GPT, batch: MicroBatch, number: int = 1) -> Step:
    """Returns one step of the loop by hand, with the weights of our model.

    Args:
        ours: Our model.
        batch: A micro-batch.
        number: Number of micro-batches.
    """
    rotary = ours.config.position_embedding_type == "rope"
    model: Any = plain_llama(ours) if rotary else plain_copy(ours)
    parameters = list(model.parameters())
    mains = [nn.Parameter(p.detach().float()) for p in parameters]
    groups = [
        {"params": [p for p in mains if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in mains if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, fused=True)
    compiled = torch.compile(model, dynamic=False)
    device = parameters[0].device

    def step() -> torch.Tensor:
        tokens, labels = (
            batch.fields[name].to(device, non_blocking=True) for name in ("tokens", "labels")
        )
        for _ in range(number):
            loss: torch.Tensor = compiled(tokens, labels) / number
            loss.backward()
        for main, parameter in zip(mains, parameters, strict=True):
            main.grad = parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_(mains, CLIP, foreach=True)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, mains)
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


class Measured(NamedTuple):
    """What was measured of one variant: seconds of rounds, bytes at the peak, first seconds."""

    seconds: list[float]
    peak: int
    start: float


def timed(step: Step, steps: int, device: torch.device) -> float:
    """Returns the seconds of a step."""
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / steps


def profile(step: Step, name: str, folder: Path | None) -> None:
    """Prints the kernels of two steps by their time, and writes a table of all operations."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    step()
    torch.cuda.synchronize()
    with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
        step()
        torch.cuda.synchronize()
    if folder is not None:
        table = found.key_averages().table(sort_by="self_cuda_time_total", row_limit=45)
        (folder / f"{name.replace(', ', '-')}.txt").write_text(table)
    kernels = [e for e in found.key_averages() if e.device_type != DeviceType.CPU]
    kernels.sort(key=lambda each: -each.self_device_time_total)
    total = sum(each.self_device_time_total for each in kernels)
    print(f"{name}: {total / 2e3:.1f} ms of kernels a step")
    for each in kernels[:20]:
        time_of = each.self_device_time_total / 2e3
        print(f"   {time_of:9.2f} ms {each.count // 2:5d} {each.key[:100]}")


class Bench:
    """Steps of all variants of a model.

    Args:
        model: The model.
        device: The GPU.

    Attributes:
        running: One step of each variant that is ready.
        found: What was measured of each variant.
    """

    def __init__(self, model: Model, device: torch.device) -> None:
        self.model, self.device, self.mesh = model, device, Mesh.single(device)
        self.batch = proof_batch(read_run(model.flags))
        self.running: dict[str, Step] = {}
        self.found: dict[str, Measured] = {}

    def prepare(self, name: str) -> None:
        """Builds a variant and runs its first steps; reports an error that it raises."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before, began = torch.cuda.memory_allocated(self.device), time.perf_counter()
        try:
            run = read_run(self.model.flags + VARIANTS.get(name, ""))
            trainer = build_ours(run, self.mesh, self.batch)
            if name == PEER:
                (stage,) = trainer.engine.stages.modules
                self.running[name] = plain_step(stage, self.batch, micro_batches(run))
                del trainer, stage
                gc.collect()
                torch.cuda.reset_peak_memory_stats(self.device)
            else:
                self.running[name] = our_step(trainer)
            timed(self.running[name], 3, self.device)
        except Exception as error:  # noqa: BLE001 - it is the result of this variant
            print(f"{name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            self.running.pop(name, None)
            return
        peak = torch.cuda.max_memory_allocated(self.device) - before
        self.found[name] = Measured([], peak, time.perf_counter() - began)
        torch.cuda.empty_cache()

    def measure(self, rounds: int, steps: int) -> None:
        """Measures the variants that are ready, interleaved."""
        for _ in range(rounds):
            for name, step in self.running.items():
                self.found[name].seconds.append(timed(step, steps, self.device))

    def profile(self, folder: Path | None) -> None:
        """Prints the kernels of the variants that are ready, and writes their tables."""
        for name, step in self.running.items():
            profile(step, name, folder)


def measure(
    model: Model, variants: list[str], rounds: int, steps: int, device: torch.device
) -> Bench:
    """Measures all variants of a model, interleaved unless they do not fit together."""
    bench = Bench(model, device)
    torch.compiler.reset()
    for name in variants:
        bench.prepare(name)
        if model.apart:
            bench.measure(rounds, steps)
            bench.running.clear()
    bench.measure(rounds, steps)
    return bench


def ceilings(device: torch.device) -> tuple[float, float]:
    """Returns FLOP/s of a bf16 product and the bytes that a copy reads and writes in a second."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    source = torch.randn(1 << 28, device=device)
    target = torch.empty_like(source)
    product = min(timed(lambda: a @ b, 10, device) for _ in range(3))
    copy = min(timed(lambda: target.copy_(source), 10, device) for _ in range(3))
    return 2 * 8192**3 / product, 2 * source.numel() * 4 / copy


def print_rows(name: str, bench: Bench, flops: float, predicted: Mapping[str, int]) -> None:
    """Prints what was measured of a model.

    Args:
        name: Name of the model.
        bench: Its measurements.
        flops: FLOP/s of a product of matrices in the same run.
        predicted: Bytes at the peak that dry-run predicts, by model and variant.
    """
    run = read_run(bench.model.flags)
    length, samples = run.data.seq_length, run.training.micro_batch_size
    tokens, kind = length * samples * micro_batches(run), torch.cuda.get_device_name(bench.device)
    work = training_flops(run.model, length, tokens)
    sheet = next((peak for part, peak in PEAKS.items() if part in kind), math.nan)
    medians = {each: statistics.median(m.seconds) for each, m in bench.found.items() if m.seconds}
    for variant, median in medians.items():
        peak, guess = bench.found[variant].peak, predicted.get(f"{name}/{variant}")
        cells = (
            name,
            variant,
            f"{median * 1e3:.1f}",
            f"{tokens / median:,.0f}",
            f"{work / median / sheet:.1%}",
            f"{work / median / flops:.1%}",
            f"{medians.get(PEER, math.nan) / median:.3f}",
            f"{peak / 2**30:.2f}",
            "" if guess is None else f"{guess / 2**30:.2f}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


def predict(models: list[str], variants: list[str]) -> dict[str, int]:
    """Returns the bytes at the peak that dry-run predicts, by model and variant."""
    found = {}
    for name in models:
        for variant in variants:
            flags = (MODELS[name].flags + VARIANTS[variant]).split()
            line = ["dry-run", "gpt", *flags, "--device", "cuda", "--json"]
            printed = subprocess.run(
                [sys.executable, "-m", "megatron_train", *line], check=True, capture_output=True
            )
            (rank,) = json.loads(printed.stdout)["of_ranks"]
            found[f"{name}/{variant}"] = rank["peak"]
    return found


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--variants", nargs="+", choices=(PEER, *VARIANTS), default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps of a round")
    parser.add_argument("--micro-batches", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--flags", default="", help="more flags of megatron-train for ours")
    parser.add_argument("--predict", type=Path, help="only write predicted memory here")
    parser.add_argument("--predicted", type=Path, help="file that --predict wrote")
    parser.add_argument("--profile", type=Path, help="folder for tables of kernels")
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args()
    variants = args.variants or [PEER, *VARIANTS]
    if args.flags:
        VARIANTS.update({name: f"{flags}{args.flags} " for name, flags in VARIANTS.items()})
    if args.predict is not None:
        found = predict(args.models, [name for name in variants if name != PEER])
        args.predict.write_text(json.dumps(found, indent=2) + "\n")
        return 0
    if not torch.cuda.is_available():
        print("gpu_step: nothing is measured: there is no GPU")
        return 0
    models = {name: MODELS[name].repeated(args.micro_batches) for name in args.models}
    device = torch.device("cuda")
    kind = torch.cuda.get_device_name(device)
    flops, bytes_ = ceilings(device)
    print(
        f"{kind}, torch {torch.__version__}, Python {platform.python_version()}: product "
        f"{flops / 1e12:.0f} TFLOP/s, copy {bytes_ / 1e12:.2f} TB/s; medians of {args.rounds} "
        f"rounds of {args.steps} steps"
    )
    predicted = {} if args.predicted is None else json.loads(args.predicted.read_text())
    print(HEADER)
    results: dict[str, Any] = {}
    for name, model in models.items():
        bench = measure(model, variants, args.rounds, args.steps, device)
        print_rows(name, bench, flops, predicted)
        for variant, (seconds, peak, start) in bench.found.items():
            results[f"{name}/{variant}"] = {"seconds": seconds, "peak": peak, "start": start}
        if args.profile is not None:
            args.profile.mkdir(parents=True, exist_ok=True)
            bench.profile(args.profile)
    if args.json is not None:
        args.json.write_text(json.dumps({"device": kind, "results": results}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
