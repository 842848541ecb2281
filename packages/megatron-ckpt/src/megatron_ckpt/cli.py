"""The command ``megatron-ckpt``. The subcommands ``inspect`` and ``verify`` do not import torch."""

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megatron_ckpt._command import Parser, report_error, run_command
from megatron_ckpt._version import __version__
from megatron_ckpt.errors import CheckpointError

if TYPE_CHECKING:
    from tqdm import tqdm

    from megatron_ckpt.convert import ConversionSize
    from megatron_ckpt.store.checkpoint import Checkpoint
    from megatron_ckpt.store.manifest import TensorRecord

PROG = "megatron-ckpt"
_UNSET: tuple[object, ...] = (0, False, None, "", "none", [], ())
_INDENT = " " * 12
_UNBROKEN = "\xa0"  # a space that textwrap does not break lines at
_WIDTH = (100, 24)
"""Columns and lines of output that goes to no terminal."""
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}


def build_parser() -> Parser:
    """Returns the parser with all subcommands."""
    parser = Parser(prog=PROG, description="Inspect, verify and convert checkpoints.")
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    inspect = commands.add_parser(
        "inspect",
        help="print the contents of a checkpoint",
        description="Print the iteration, model, files and tensors of a checkpoint. Checks the "
        "sizes of files, not their digests.",
    )
    _add_path(inspect)
    inspect.add_argument(
        "--all", action="store_true", help="print all settings, and each tensor on its own line"
    )
    inspect.set_defaults(run=_inspect)

    verify = commands.add_parser(
        "verify",
        help="compare all files with their digests",
        description="Read all files and compare them with their digests. Exits with status 1 if a "
        "digest differs.",
    )
    _add_path(verify)
    verify.set_defaults(run=_verify)

    convert = commands.add_parser(
        "convert",
        help="convert a model from or to Hugging Face's format",
        description="Import a Hugging Face folder or a GGUF file as a checkpoint, or export a "
        "checkpoint as a Hugging Face folder.",
    )
    direction = convert.add_mutually_exclusive_group()
    direction.add_argument(
        "--from-hf",
        action="store_true",
        help="import a Hugging Face folder or a GGUF file [default if SOURCE is one]",
    )
    direction.add_argument(
        "--to-hf",
        action="store_true",
        help="export a Hugging Face folder [default if SOURCE is anything else]",
    )
    convert.add_argument(
        "source", type=Path, metavar="SOURCE", help="Hugging Face folder, GGUF file or checkpoint"
    )
    convert.add_argument(
        "destination",
        type=Path,
        metavar="DESTINATION",
        help="directory of the run (import), or folder to create (export)",
    )
    convert.add_argument(
        "--family",
        metavar="NAME",
        help="family of the model [default as recorded in the source, or the only one that fits]",
    )
    convert.add_argument(
        "--dtype", choices=list(_DTYPES), help="precision of the weights [default unchanged]"
    )
    convert.add_argument(
        "--iteration",
        type=int,
        metavar="N",
        help="iteration to save as [default 0], or iteration to export [default: the newest]",
    )
    convert.add_argument(
        "--max-shard-gb",
        type=float,
        default=5.0,
        metavar="X",
        help="largest size of a weight file in GB",
    )
    convert.set_defaults(run=_convert)
    return parser


def _add_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help="checkpoint, or directory of a run")
    parser.add_argument(
        "--iteration",
        type=int,
        metavar="N",
        help="iteration of the checkpoint [default the newest complete one]",
    )


def _inspect(arguments: argparse.Namespace) -> int:
    from megatron_ckpt.store.store import find_checkpoint

    checkpoint = find_checkpoint(arguments.path, arguments.iteration)
    manifest = checkpoint.manifest
    print(f"checkpoint  {checkpoint.path}")
    print(f"iteration   {manifest.iteration}")
    print(f"digest      {manifest.digest}")
    print(f"saved by    {manifest.world_size} rank(s), {_pairs(manifest.versions)}")
    if manifest.model:
        model = manifest.model
        family = "no family" if model.family is None else f"family {model.family}"
        print(f"model       {model.kind}, {family}, configuration of version {model.version}")
        _print_settings(manifest.model.config, each=arguments.all)
    print("files")
    for name, record in manifest.files.items():
        print(f"  {_size(record.size):>10}  {name}")
    for group in sorted({record.group for record in manifest.tensors.values()}):
        held = {n: r for n, r in manifest.tensors.items() if r.group == group}
        elements = sum(_elements(record) for record in held.values())
        total = _size(sum(map(_bytes, held.values())))
        print(f"{group}: {len(held)} tensors, {elements:,} elements, {total}")
        _print_tensors(held, each=arguments.all)
    return 0


def _print_settings(config: Mapping[str, object], *, each: bool) -> None:
    """Prints settings, wrapped to the terminal; unless ``each``, only those that are set."""
    shown = {name: value for name, value in config.items() if each or value not in _UNSET}
    lines = textwrap.wrap(
        ", ".join(f"{name}{_UNBROKEN}{value}" for name, value in shown.items()),
        shutil.get_terminal_size(_WIDTH).columns,
        initial_indent=_INDENT,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    print("\n".join(lines).replace(_UNBROKEN, " "))
    if hidden := len(config) - len(shown):
        print(f"{_INDENT}and {hidden} that are 0, False, none or empty (--all prints them)")


def _print_tensors(tensors: "dict[str, TensorRecord]", *, each: bool) -> None:
    """Prints tensors; unless ``each``, tensors that differ only in their layer share a line."""
    lines: dict[tuple[str, str, str], list[int]] = {}
    for name, record in tensors.items():
        shown = name if each else re.sub(r"(?<=\.)\d+(?=\.)", "{i}", name)
        key = (shown, "x".join(map(str, record.shape)) or "scalar", record.dtype)
        lines.setdefault(key, []).append(_bytes(record))
    width = max(len(name) for name, _, _ in lines)
    for (name, shape, dtype), sizes in sorted(lines.items()):
        count = f"{len(sizes)} x " if len(sizes) > 1 else ""
        print(f"  {name:<{width}}  {dtype:<5} {shape:<18} {count}{_size(sizes[0])}")


def _verify(arguments: argparse.Namespace) -> int:
    from megatron_ckpt.store.store import find_checkpoint

    checkpoint = find_checkpoint(arguments.path, arguments.iteration)
    files = checkpoint.manifest.files
    size = sum(record.size for record in files.values())
    with _bar(size, "verify") as bar:
        problems = checkpoint.verify(bar.update)
    for problem in problems:
        report_error(PROG, problem)
    if problems:
        return 1
    print(f"{checkpoint.path}: {len(files)} files, {_size(size)}, all digests match")
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from megatron_ckpt.convert import export_hf, family_of, import_hf
    from megatron_ckpt.dtypes import torch_dtype
    from megatron_ckpt.store.foreign import is_importable
    from megatron_ckpt.store.store import find_checkpoint

    dtype = torch_dtype(_DTYPES[arguments.dtype]) if arguments.dtype else None
    source, target = arguments.source, arguments.destination
    with _bar(0, "convert") as bar:

        def on_start(size: "ConversionSize") -> None:
            bar.reset(size.nbytes)

        if arguments.from_hf or (not arguments.to_hf and is_importable(source)):
            result = import_hf(
                source,
                target,
                family=arguments.family,
                dtype=dtype,
                iteration=arguments.iteration or 0,
                on_start=on_start,
                on_note=lambda note: sys.stderr.write(f"{PROG}: warning: {note}\n"),
                progress=bar.update,
            )
        else:
            checkpoint: Checkpoint = find_checkpoint(source, arguments.iteration)
            family = family_of(checkpoint, arguments.family).name
            if arguments.family is None and checkpoint.model and checkpoint.model.family is None:
                note = f"{checkpoint.path} names no family; {family} is the only one that fits"
                sys.stderr.write(f"{PROG}: note: {note}\n")
            result = export_hf(
                checkpoint,
                target,
                family=family,
                dtype=dtype,
                max_shard_bytes=int(arguments.max_shard_gb * 1e9),
                on_start=on_start,
                progress=bar.update,
            )
    print(result)
    return 0


def _bar(total: int, what: str) -> "tqdm[NoReturn]":
    from tqdm import tqdm

    # disable=None shows no bar if standard error is not a terminal.
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, unit_divisor=1024, disable=None)


def _elements(record: "TensorRecord") -> int:
    count = 1
    for extent in record.shape:
        count *= extent
    return count


def _bytes(record: "TensorRecord") -> int:
    from megatron_ckpt.dtypes import item_size

    return _elements(record) * item_size(record.dtype)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def _pairs(values: object) -> str:
    return ", ".join(f"{key} {value}" for key, value in dict(values).items())  # type: ignore[call-overload]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``megatron-ckpt`` and returns its exit status (see `run_command`)."""
    return run_command(build_parser(), argv, lambda: (CheckpointError,))
