"""The command `megatron-kernels`: what would run here and why, and whether it is right."""

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from megatron_kernels._version import __version__
from megatron_kernels.errors import KernelError

if TYPE_CHECKING:
    import torch

    from megatron_kernels.registry import Choice

PROG = "megatron-kernels"
DTYPES = ("float64", "float32", "bfloat16", "float16")


class Parser(argparse.ArgumentParser):
    """An argument parser that answers a misspelt word with the nearest one, in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        wrong = re.search(r"(?:unrecognized arguments: |invalid choice: ')([^\s']+)", message)
        known = [option for action in self._actions for option in action.option_strings]
        known += [str(name) for action in self._actions for name in action.choices or ()]
        near = difflib.get_close_matches(wrong[1], known, n=1) if wrong else []
        hint = f"; did you mean {near[0]}?" if near else ""
        self.exit(2, f"{self.prog}: error: {message}{hint}\n")


def build_parser() -> Parser:
    """The parser with both subcommands."""
    parser = Parser(prog=PROG, description="Look at and check the backends of every operation.")
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)

    listing = commands.add_parser(
        "list",
        help="operations, their backends, and which would run",
        description="Print, for every operation, what each backend says to a small call on this "
        "device in this dtype, and which one would run; then the optional libraries.",
    )
    listing.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, … (default: cpu)")
    listing.add_argument("--dtype", choices=DTYPES, default="float32", help="(default: float32)")
    listing.set_defaults(run=_list, parser=listing)

    check = commands.add_parser(
        "check",
        help="compare every usable backend with the reference in float64",
        description="Run every backend on small inputs, compare values and gradients with the "
        "reference in float64, and exit with 1 if any deviates by more than the dtype's tolerance.",
    )
    check.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, … (default: cpu)")
    check.add_argument(
        "--dtype", choices=DTYPES, nargs="+", default=list(DTYPES[:3]), metavar="DTYPE",
        help=f"one or more of {', '.join(DTYPES)} (default: the first three)",
    )  # fmt: skip
    check.set_defaults(run=_check, parser=check)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    arguments, rest = build_parser().parse_known_args(argv)
    if rest:
        arguments.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        status: int = arguments.run(arguments)
    except (KernelError, OSError) as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted", file=sys.stderr)
        return 130
    return status


def _list(arguments: argparse.Namespace) -> int:
    import torch

    from megatron_kernels.availability import report
    from megatron_kernels.cases import CASES, Source

    source = Source(getattr(torch, arguments.dtype), _device(arguments.device))
    choices: dict[Choice, list[str]] = {}
    for case in CASES:
        choice = case.op.explain(*case.arguments(source))
        choices.setdefault(choice, []).append(case.label)
    several = {name for name in _names(choices) if _names(choices).count(name) > 1}
    for choice, labels in choices.items():
        title, *lines = str(choice).splitlines()
        where = f" for {'; '.join(labels)}" if choice.op in several else ""
        print(f"{title}{where}", *lines, sep="\n")
    print("optional libraries", *(f"   {library}" for library in report()), sep="\n")
    return 0


def _names(choices: dict["Choice", list[str]]) -> list[str]:
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
            if result.refusal is not None:
                skipped[f"  {result.op}, {result.backend}: {result.refusal}"] = None
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
    """The device of that name.

    Raises:
        KernelError: There is none here.
    """
    import torch

    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise KernelError(f"--device {name}: {reason}; use --device cpu") from error
    return device
