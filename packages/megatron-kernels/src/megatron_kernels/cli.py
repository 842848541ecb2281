"""The command `megatron-kernels`: lists the backends of this machine and checks them."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_kernels._command import Parser, run_command
from megatron_kernels._version import __version__
from megatron_kernels.errors import KernelError

if TYPE_CHECKING:
    import torch

    from megatron_kernels.registry import BackendChoice

PROG = "megatron-kernels"
DTYPES = ("float64", "float32", "bfloat16", "float16")


def build_parser() -> Parser:
    """Returns the parser with both subcommands."""
    parser = Parser(prog=PROG, description="List and check the backends of every operation.")
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
        description="Run every backend on small inputs, compare values and gradients with the "
        "reference in float64, and exit with 1 if any deviation exceeds the dtype's tolerance.",
    )
    check.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu, cuda, cuda:1, …")
    check.add_argument(
        "--dtype", choices=DTYPES, nargs="+", default=list(DTYPES[:3]), metavar="DTYPE",
        help=f"one or more of {', '.join(DTYPES)}",
    )  # fmt: skip
    check.set_defaults(run=_check)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``megatron-kernels``; returns the exit status (`run_command` lists them)."""
    return run_command(build_parser(), argv, lambda: (KernelError,))


def _list(arguments: argparse.Namespace) -> int:
    import torch

    from megatron_kernels.availability import library_availability
    from megatron_kernels.cases import CASES, InputGenerator

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
    return 0


def _names(choices: dict["BackendChoice", list[str]]) -> list[str]:
    return [choice.op for choice in choices]


def _check(arguments: argparse.Namespace) -> int:
    import torch

    from megatron_kernels.check import TOLERANCES, check

    device = _device(arguments.device)
    failed = run = 0
    skipped: dict[str, None] = {}
    for name in arguments.dtype:
        dtype = getattr(torch, name)
        print(f"{name} on {device}, tolerance {TOLERANCES[dtype]:g}")
        print(f"  {'operation':<30} {'backend':<11} {'error':>8} {'gradient':>9}")
        for result in check(dtype, device):
            if result.unsupported_reason is not None:
                skipped[f"  {result.op}, {result.backend}: {result.unsupported_reason}"] = None
                continue
            run += 1
            failed += not result.passed
            title = f"{result.op} ({result.case})" if result.case else result.op
            verdict = "" if result.passed else "  FAILED"
            numbers = f"{result.error:8.1e} {result.gradient_error:9.1e}"
            print(f"  {title:<30} {result.backend:<11} {numbers}{verdict}")
    if skipped:
        print("not checked", *skipped, sep="\n")
    print(f"{run - failed} of {run} checks passed")
    return 1 if failed else 0


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
