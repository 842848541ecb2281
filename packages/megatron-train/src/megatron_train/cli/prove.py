"""``megatron-train prove KIND``: whether a layout computes what one rank computes."""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_train.cli.model_command import add_model_command
from megatron_train.cli.run_source import add_run_source
from megatron_train.config.described_run import resolve_run
from megatron_train.config.flags import Parser
from megatron_train.errors import TrainError, UsageError
from megatron_train.prove.shrink import ShrunkRun, shrink_run

if TYPE_CHECKING:
    from megatron_train.prove.proof import Proof

_EXAMPLE = """\
example:
  megatron-train prove gpt --recipe gpt3-175b --world-size 1024
  megatron-train prove gpt --recipe llama-tiny --tensor-model-parallel-size 2 \\
    --sequence-parallel --defect norms-not-summed
"""


def add_command(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Adds the command to ``commands``."""
    add_model_command(
        commands,
        "prove",
        "prove on this machine that a layout trains as one rank does",
        add_flags=_add_flags,
        usage="[--recipe NAME | --hf-config FILE]\n       [--world-size N] [flags]",
        description="Prove a layout for {summary}. Trains a small copy in float64 in the "
        "layout and on one rank, and compares losses, gradient norms, all gradients and all "
        "parameters. Takes the flags of megatron-train pretrain; data, tokenizer and lengths may "
        "be left out. The status is 0 if they are equal, and 1 if they are not.",
        example=_EXAMPLE,
        run=run,
    )


def _add_flags(kind: str, parser: Parser) -> None:
    parser.add_argument("--steps", metavar="N", default="20", help="steps of either training")
    parser.add_argument(
        "--max-ranks", metavar="N", default="8", help="processes of the small layout, at most"
    )
    parser.add_argument(
        "--defect", metavar="NAME", help="plant a defect, which the proof must find"
    )
    parser.add_argument(
        "--list-defects", action="store_true", help="list the defects that the layout can have"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_run_source(parser, kind)


def run(arguments: argparse.Namespace) -> int:
    """Proves the layout; returns 0 if it equals one rank, and 1 if not."""
    steps = _positive("--steps", arguments.steps)
    max_ranks = _positive("--max-ranks", arguments.max_ranks)
    small = shrink_run(resolve_run(arguments), steps, max_ranks)
    if arguments.list_defects:
        return _list_defects(small)
    from megatron_parallel.testing import WorkerError
    from tqdm import tqdm

    from megatron_train.prove.proof import prove

    if not arguments.json:
        for line in _describe(small, steps):
            sys.stdout.write(line + "\n")
        sys.stdout.flush()
    with tqdm(total=2 * steps, unit="step", disable=None, leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.update(done - bar.n)

        try:
            proof = prove(small, arguments.defect, show)
        except WorkerError as error:
            headline, _, details = str(error).partition("\n")
            sys.stderr.write(details + "\n")
            raise TrainError(f"the proof did not end: {headline}") from None
    if arguments.json:
        sys.stdout.write(json.dumps(_to_dict(small, proof, arguments.defect), indent=2) + "\n")
    else:
        for line in _report(small, proof, arguments.defect):
            sys.stdout.write(line + "\n")
    return 0 if proof.equal else 1


def _positive(flag: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{flag} needs a positive integer, got {text!r}")
    return int(text)


def _list_defects(small: ShrunkRun) -> int:
    from megatron_train.prove.defects import CATALOGUE

    width = max(len(each.name) for each in CATALOGUE)
    for each in CATALOGUE:
        if each.applies(small.run):
            sys.stdout.write(f"{each.name:<{width}}  {each.summary}\n")
    return 0


def _describe(small: ShrunkRun, steps: int) -> Iterator[str]:
    """Yields what is proven, and what was shrunk."""
    config = small.run
    yield f"small copy: {config.layout}"
    if config.layout.pp > 1:
        sizes = " ".join(str(len(layers)) for layers in config.layer_split)
        yield f"layers of each pipeline stage: {sizes}"
    count = config.global_batch_size // config.micro_batch_times_data_parallel_size
    yield (
        f"{steps} steps of {config.global_batch_size} samples, micro-batches of "
        f"{config.training.micro_batch_size}, {count} on each data parallel rank; float64; "
        f"optimizer {config.optimizer.optimizer}"
    )
    shrunk = (f"{each.setting} {each.before:,} -> {each.after:,}" for each in small.changes)
    yield f"shrunk: {'; '.join(shrunk) or 'nothing'}"
    yield f"not covered: {', '.join(small.not_covered)}"


def _rows(proof: "Proof") -> list[tuple[str, float, float]]:
    """Returns what was compared: its name, its largest difference and the limit."""
    from megatron_train.prove.compare import LIMIT

    found = proof.differences
    rows = [
        ("loss of each step", found.loss, LIMIT),
        ("gradient norm of each step", found.norm, LIMIT),
        ("all gradients of each step, relative", found.gradient, LIMIT),
        ("all parameters after the last step", found.parameter, LIMIT),
    ]
    if found.rerouted is not None:
        rows.append(("tokens with other experts", found.rerouted, 0))
    return rows


def _report(small: ShrunkRun, proof: "Proof", defect: str | None) -> Iterator[str]:
    """Yields the table and the verdict."""
    yield ""
    yield f"{'largest difference from one rank':<38} {'found':>8} {'limit':>8}"
    for name, found, limit in _rows(proof):
        yield f"{name:<38} {found:>8.2g} {limit:>8.2g}"
    yield ""
    if proof.first is not None:
        yield f"first: {_first(small, proof)}"
    planted = f" with the planted defect {defect}" if defect else ""
    verdict = "equals" if proof.equal else "DOES NOT EQUAL"
    yield (
        f"the layout{planted} {verdict} one rank: {proof.parameters:,} parameters, "
        f"{proof.seconds:.0f} s"
    )


def _first(small: ShrunkRun, proof: "Proof") -> str:
    first = proof.first
    if first is None:
        return ""
    what = f"{first.what} of {first.name}" if first.name else first.what
    everywhere = len(first.ranks) == small.run.layout.world_size
    numbers = ", ".join(map(str, first.ranks))
    where = "all ranks" if everywhere else f"rank{'s' * (len(first.ranks) != 1)} {numbers}"
    more = f", and {first.others} others" if first.others else ""
    return f"step {first.step}, {what} by {first.size:.2g} on {where}{more}"


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values for JSON, which has no infinite numbers: None stands for them."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def _to_dict(small: ShrunkRun, proof: "Proof", defect: str | None) -> dict[str, Any]:
    first = proof.first
    return {
        "equal": proof.equal,
        "defect": defect,
        "differences": {
            name: _finite({"found": found, "limit": limit}) for name, found, limit in _rows(proof)
        },
        "first": None if first is None else _finite(vars(first)),
        "layout": str(small.run.layout),
        "ranks": small.run.layout.world_size,
        "shrunk": [vars(each) for each in small.changes],
        "not_covered": list(small.not_covered),
        "parameters": proof.parameters,
        "seconds": round(proof.seconds, 1),
    }
