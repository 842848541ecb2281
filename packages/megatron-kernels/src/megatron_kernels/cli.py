"""The command `megatron-kernels`: lists the backends of a machine, checks and measures them."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_kernels._command import Parser, run_command
from megatron_kernels._version import __version__
from megatron_kernels.errors import KernelError

if TYPE_CHECKING:
    import torch

    from megatron_kernels.bench import Report
    from megatron_kernels.check import Result
    from megatron_kernels.registry import BackendChoice

PROG = "megatron-kernels"
DTYPES = ("float64", "float32", "bfloat16", "float16")
SIZES = ("small", "medium", "large")
INPUTS = ("small", "empty", "one", "large", "many", "strided", "nan", "inf")


def build_parser() -> Parser:
    """Returns the parser with all subcommands."""
    parser = Parser(
        prog=PROG, description="List, check and measure the backends of every operation."
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    listing = commands.add_parser(
        "list",
        help="list operations, their backends, and the backend that would run",
        description="Print, for every operation, whether each backend supports a small call on "
        "this device in this dtype, and which backend would run; then the optional libraries.",
    )
    listing.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu, cuda, cuda:1, …")
    listing.add_argument("--dtype", choices=DTYPES, default="float32", help="precision")
    listing.set_defaults(run=_list)

    check = commands.add_parser(
        "check",
        help="compare every usable backend with the reference in float64",
        description="Run every backend on a grid of inputs, compare values and gradients with the "
        "reference in float64, and exit with 1 if any deviation exceeds the dtype's tolerance.",
    )
    check.add_argument("ops", nargs="*", metavar="OP", help="operations; without any, all")
    check.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu, cuda, cuda:1, …")
    check.add_argument(
        "--dtype", choices=DTYPES, nargs="+", default=list(DTYPES), metavar="DTYPE",
        help=f"one or more of {', '.join(DTYPES)}",
    )  # fmt: skip
    check.add_argument(
        "--inputs", choices=INPUTS, nargs="+", default=list(INPUTS), metavar="KIND",
        help=f"one or more of {', '.join(INPUTS)}",
    )  # fmt: skip
    check.set_defaults(run=_check)

    bench = commands.add_parser(
        "bench",
        help="measure every usable backend against the limits of the device",
        description="Time all backends of calls at the sizes of models, interleaved with a copy "
        "and a matrix product, and print medians, rates and the share of the bound.",
    )
    bench.add_argument("ops", nargs="*", metavar="OP", help="operations; without any, all")
    bench.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu, cuda, cuda:1, …")
    bench.add_argument("--dtype", choices=DTYPES, default="float32", help="precision")
    bench.add_argument("--size", choices=SIZES, default="medium", help="sizes of the calls")
    bench.add_argument("--rounds", type=int, default=7, metavar="N", help="rounds of all backends")
    bench.add_argument(
        "--backends", nargs="+", metavar="NAME", help="backends to measure; defaults to all"
    )
    bench.add_argument("--picture", metavar="FILE", help="draw a roofline, such as roofline.png")
    bench.set_defaults(run=_bench)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``megatron-kernels``; returns the exit status (`run_command` lists them)."""
    return run_command(build_parser(), argv, lambda: (KernelError,))


def _list(arguments: argparse.Namespace) -> int:
    import torch

    from megatron_kernels.availability import library_availability
    from megatron_kernels.cases import CASES
    from megatron_kernels.inputs import InputGenerator
    from megatron_kernels.registry import NEVER_RUN
    from megatron_kernels.transformer_engine import TransformerEngineRecipe
    from megatron_kernels.transformer_engine.check import SCALINGS, recipe_reason

    source = InputGenerator(getattr(torch, arguments.dtype), _device(arguments.device))
    choices: dict[BackendChoice, list[str]] = {}
    for case in CASES:
        choice = case.op.explain(*case.arguments(source))
        choices.setdefault(choice, []).append(case.label or "plain")
    ambiguous = {name for name in _names(choices) if _names(choices).count(name) > 1}
    for choice, labels in choices.items():
        title, *lines = str(choice).splitlines()
        where = f" for {'; '.join(labels)}" if choice.op in ambiguous else ""
        print(f"{title}{where}", *lines, sep="\n")
    print("optional libraries", *(f"   {library}" for library in library_availability()), sep="\n")
    print(f"products in few bits by Transformer Engine  [on request only, {NEVER_RUN}]")
    for scaling in SCALINGS:
        reason = recipe_reason(TransformerEngineRecipe(scaling), source.device)
        print(f"   {scaling:<15} {'can run' if reason is None else f'cannot: {reason}'}")
    return 0


def _names(choices: dict["BackendChoice", list[str]]) -> list[str]:
    return [choice.op for choice in choices]


def _check(arguments: argparse.Namespace) -> int:
    import torch

    from megatron_kernels._progress import progress
    from megatron_kernels.check import TOLERANCES, Result, check, count_checks
    from megatron_kernels.choices import find_operation
    from megatron_kernels.transformer_engine import NAME
    from megatron_kernels.transformer_engine.check import check_recipes

    device = _device(arguments.device)
    ops, inputs = [find_operation(name).name for name in arguments.ops], arguments.inputs
    failed = run = 0
    skipped: dict[str, None] = {}
    known: dict[str, None] = {}
    for name in arguments.dtype:
        dtype = getattr(torch, name)
        print(f"{name} on {device}, tolerance {TOLERANCES[dtype]:g}, inputs {', '.join(inputs)}")
        print(f"  {'operation':<40} {'backend':<18} {'error':>8} {'gradient':>9}")
        rows: dict[tuple[str, str], list[Result]] = {}
        checks = check(dtype, device, inputs, ops)
        for result in progress(checks, count_checks(dtype, inputs, ops), "checks"):
            if result.unsupported_reason is not None:
                skipped[f"  {result.op}, {result.backend}: {result.unsupported_reason}"] = None
                continue
            title = f"{result.op} ({result.case})" if result.case else result.op
            rows.setdefault((title, result.backend), []).append(result)
        for (title, backend), results in rows.items():
            right = [result for result in results if result.within_tolerance]
            wrong = [result for result in results if not result.passed]
            run += len(results)
            failed += len(wrong)
            if right or wrong:
                error = max(result.error for result in wrong or right)
                gradient = max(result.gradient_error for result in wrong or right)
                print(f"  {title:<40} {backend:<18} {error:8.1e} {gradient:9.1e}{_verdict(wrong)}")
            known |= {
                f"  {title}, {backend}, {each.inputs}: {each.known}": None
                for each in results
                if each.known is not None and not each.within_tolerance
            }
    if not ops or "linear" in ops:
        for each in check_recipes(device):
            title = f"products in few bits ({each.scaling})"
            if each.unsupported_reason is not None:
                skipped[f"  {title}, {NAME}: {each.unsupported_reason}"] = None
                continue
            run, failed = run + 1, failed + (not each.passed)
            forward, *gradients = each.errors
            verdict = "" if each.passed else "  FAILED"
            print(f"  {title:<40} {NAME:<18} {forward:8.1e} {max(gradients):9.1e}{verdict}")
    if skipped:
        print("not checked", *skipped, sep="\n")
    if known:
        print("known deviations", *known, sep="\n")
    print(f"{run - failed} of {run} checks passed")
    return 1 if failed else 0


def _verdict(wrong: "Sequence[Result]") -> str:
    """Returns the inputs that a backend fails with, and its error if it raised one."""
    if not wrong:
        return ""
    raised = next((f": {each.failure}" for each in wrong if each.failure is not None), "")
    return f"  FAILED with {', '.join(each.inputs for each in wrong)}{raised}"


def _bench(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    import torch

    from megatron_kernels._progress import progress
    from megatron_kernels.bench import Report, bench, workloads_of
    from megatron_kernels.choices import find_operation

    if arguments.rounds < 1:
        raise KernelError(f"--rounds {arguments.rounds} is not positive; use for example 7")
    device, dtype = _device(arguments.device), getattr(torch, arguments.dtype)
    ops = [find_operation(name).name for name in arguments.ops]
    if missing := [name for name in ops if not workloads_of([name])]:
        raise KernelError(f"{missing[0]} is not measured; leave it out")
    backends = arguments.backends or ()
    if not workloads_of(ops, backends):
        raise KernelError(f"no measured operation has a backend {' or '.join(backends)}")
    threads = torch.get_num_threads()
    where = f"{device}, 1 thread, CPU time" if threads == 1 else f"{device}, {threads} threads"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    title = f"{arguments.dtype}, {arguments.size}, on {where}"
    print(f"{title}: medians of {arguments.rounds} rounds, ms")
    print(f"  {'backend':<18} {'forward':>9} {'both':>9} {'rate':>14} {'of bound':>9}")
    reports: list[Report] = []
    calls = bench(device, dtype, arguments.size, ops, arguments.rounds, backends)
    for report in progress(calls, len(workloads_of(ops, backends)), "calls"):
        reports.append(report)
        _print_report(report)
    if arguments.picture is not None:
        from megatron_kernels.roofline import write_roofline

        write_roofline(reports, Path(arguments.picture), title)
        print(f"wrote {arguments.picture}")
    return 0


def _print_report(report: "Report") -> None:
    """Prints the rates of the device in these rounds, and a line for each backend."""
    rates, found = report
    limits = f"copy {rates.bytes / 1e9:,.1f} GB/s, product {rates.flops / 1e9:,.1f} GFLOP/s"
    print(f"{found[0].title}  [{limits}]")
    for each in found:
        if each.reason is not None:
            print(f"  {each.backend:<18} cannot: {each.reason}")
            continue
        rate = f"{each.rate / 1e9:.3g} {'GFLOP/s' if each.by_products else 'GB/s'}"
        both = f"{1e3 * each.both:9.3f}" if each.both else f"{'':>9}"
        label = "" if each.label is None else f"  on request only, {each.label}"
        print(
            f"  {each.backend:<18} {1e3 * each.forward:9.3f} {both} "
            f"{rate:>14} {each.share:>9.0%}{label}"
        )


def _device(name: str) -> "torch.device":
    """Returns the named device.

    Raises:
        KernelError: The device does not exist.
    """
    import torch

    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise KernelError(f"--device {name}: {reason}; use --device cpu") from error
    return device
