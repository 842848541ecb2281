"""How long a person waits: for the help of each command, and for the first step of training.

Each command runs as a new process, interleaved with an empty program and one that imports torch.
The table has medians in milliseconds, wall-clock and CPU, and the ratio to the empty program.

    OMP_NUM_THREADS=1 python tooling/bench/start_up.py [--rounds 7]

The integration tests count imports (`test_start_up.py`, `test_imports.py`). Only this benchmark
measures seconds, on a quiet machine.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_data import IndexedDatasetBuilder
from parsers import commands, console_scripts, parser_of

PEERS = {
    "an empty program": [sys.executable, "-c", "pass"],
    "import torch": [sys.executable, "-c", "import torch"],
    "import torch and all names of megatron_kernels": [
        sys.executable,
        "-c",
        "import torch, megatron_kernels as m; [getattr(m, name) for name in m.__all__]",
    ],
}
TRAIN = (
    "megatron-train pretrain gpt --num-layers 2 --hidden-size 32 --num-attention-heads 2 "
    "--seq-length 32 --vocab-size 256 --micro-batch-size 2 --train-iters 2 --log-interval 1 "
    "--eval-iters 0 --train-data-path text --device cpu"
)
FIRST_STEP = "first step of training"


def every_command() -> list[str]:
    """Returns all commands of all packages, from their parsers."""
    programs = map(parser_of, console_scripts().values())
    return [command.prog for program in programs for command in commands(program)]


def program(line: str) -> list[str]:
    name, *words = line.split()
    return [str(Path(sys.executable).with_name(name)), *words]


def measure(words: Sequence[str], folder: Path, until: str = "") -> tuple[float, float]:
    """Returns wall-clock and CPU milliseconds of a program, or until it prints a line."""
    began = time.perf_counter()
    process = subprocess.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    seen = not until
    for line in process.stdout or ():
        if until and re.search(until, line):
            seen = True
            process.kill()
            break
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    waited = time.perf_counter() - began
    if not seen or (process.returncode and not until):
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}")
    return 1e3 * waited, 1e3 * (used.ru_utime + used.ru_stime)


def write_tokens(path: Path) -> None:
    """Writes a corpus of 2,400 tokens to train on."""
    with IndexedDatasetBuilder(str(path), "uint16") as builder:
        for start in range(40):
            builder.add_item([(start + i) % 250 for i in range(60)])
            builder.end_document()
        builder.finalize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    helps = [f"{command} --help" for command in every_command()]
    ways = PEERS | {line: program(line) for line in helps}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in (*ways, FIRST_STEP)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokens(folder / "text")
        for number in range(rounds + 1):
            found = {name: measure(words, folder) for name, words in ways.items()}
            found[FIRST_STEP] = measure(program(TRAIN), folder, r"iteration +1/")
            if number:  # the first round compiles bytecode and fills caches
                for name, pair in found.items():
                    times[name].append(pair)
    print("| program | wall, ms | CPU, ms | CPU, times an empty program's |\n|---|---|---|---|")
    empty = statistics.median(cpu for _, cpu in times["an empty program"])
    for name, pairs in times.items():
        wall, cpu = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"| {name} | {wall:.0f} | {cpu:.0f} | {cpu / empty:.1f} |")


if __name__ == "__main__":
    main()
