"""The number of modules that a command imports at its start, which determines the user's wait.

``tooling/bench/start_up.py`` measures seconds; nothing here depends on elapsed time.
"""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

import pytest

MODULES = {
    "megatron-data": 200,
    "megatron-ckpt": 140,
    "megatron-train": 410,
    "megatron-infer": 160,
    "megatron-kernels": 140,
}
"""Maximum number of modules that the help of all commands of a script imports together."""

ALLOWED = {
    "megatron-data": {"lazy_loader", "orjson"},
    "megatron-ckpt": {"lazy_loader"},
    # Compiled parts of PyYAML register their runtime as modules.
    "megatron-train": {"lazy_loader", "orjson", "yaml", "cython_runtime", "_cython_"},
    "megatron-infer": {"lazy_loader"},
    "megatron-kernels": {"lazy_loader"},
}
"""Third-party packages that help may import; torch is not among them."""

TIMES = 60
"""Maximum CPU seconds of a command's help as a multiple of those of an empty program."""

HELP = """
import argparse, contextlib, io, json, sys
from importlib.metadata import entry_points

def commands(parser):
    yield parser.prog
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from commands(below)

before = set(sys.modules)
(script,) = entry_points(group="console_scripts", name=sys.argv[1])
main = script.load()
for planted in sys.argv[2:]:
    __import__(planted)
shown = {}
for command in commands(sys.modules[main.__module__].build_parser()):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            main([*command.split()[1:], "--help"])
        except SystemExit as left:
            shown[command] = [left.code, printed.getvalue()]
json.dump([sorted(set(sys.modules) - before), shown], sys.stdout)
"""


def environment() -> dict[str, str]:
    """Returns an environment in which bytecode is cached, as in an installation."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}


def imported_by_help(script: str, *planted: str) -> tuple[list[str], dict[str, tuple[int, str]]]:
    """Returns the modules that all help of a script imports, and status and text per command."""
    done = subprocess.run(
        [sys.executable, "-c", HELP, script, *planted],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    modules, shown = json.loads(done.stdout)
    return modules, shown


def too_much(script: str, modules: Sequence[str]) -> list[str]:
    """Returns the errors in the imports of a script."""
    ours = tuple(f"megatron_{name}" for name in ("data", "infer", "train", "ckpt", "kernels"))
    ours += ("megatron_models", "megatron_optim", "megatron_parallel")
    roots = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - {*ours}
    kinds = [entry.module.partition(".")[0] for entry in entry_points(group="megatron.models")]
    allowed = (
        *ALLOWED[script],
        *kinds,
    )  # the help of some commands lists the installed kinds of models
    wrong = [root for root in sorted(roots) if not root.startswith(allowed)]
    if len(modules) > MODULES[script]:
        wrong.append(f"{len(modules)} modules, more than {MODULES[script]}")
    return wrong


def cpu_seconds(words: Sequence[str | Path]) -> float:
    """Returns the smallest CPU seconds of three runs, independent of the load of the machine."""
    least = float("inf")
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=environment())
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        least = min(least, used)
    return least


@pytest.mark.parametrize("script", MODULES)
def test_help_imports_few_modules_and_has_a_description(script: str) -> None:
    modules, shown = imported_by_help(script)
    assert too_much(script, modules) == []
    for command, (status, text) in shown.items():
        assert status == 0 and text.startswith(f"usage: {command}"), command
    wanted = {
        "megatron-data": {"train-tokenizer", "preprocess", "inspect", "verify"},
        "megatron-ckpt": {"inspect", "verify", "convert"},
        "megatron-train": {"pretrain gpt", "layout", "recipes show", "config find", "report"},
        "megatron-infer": {"generate", "serve", "chat"},
        "megatron-kernels": {"list", "check"},
    }
    assert {f"{script} {word}" for word in wanted[script]} <= shown.keys()


@pytest.mark.parametrize("planted", ["numpy", "tokenizers"])
def test_a_heavy_import_is_detected(planted: str) -> None:
    modules, _ = imported_by_help("megatron-ckpt", planted)
    assert planted in too_much("megatron-ckpt", modules)
    many = [f"megatron_ckpt.m{number}" for number in range(MODULES["megatron-ckpt"] + 1)]
    assert too_much("megatron-ckpt", many) == ["141 modules, more than 140"]


@pytest.mark.parametrize("script", MODULES)
def test_help_takes_little_more_cpu_time_than_an_empty_program(script: str) -> None:
    program = Path(sys.executable).with_name(script)
    subprocess.run([program, "--help"], check=True, capture_output=True, env=environment())
    empty = cpu_seconds([sys.executable, "-c", "pass"])
    assert cpu_seconds([program, "--help"]) < TIMES * empty


def test_cpu_seconds_count_work_and_not_waiting() -> None:
    work = "import time\nwhile time.process_time() < 0.3: pass"
    assert cpu_seconds([sys.executable, "-c", work]) >= 0.3
    assert cpu_seconds([sys.executable, "-c", "import time; time.sleep(0.3)"]) < 0.3
