"""The boundary checks can fail: each fault planted here must turn its check red."""

import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


FORBIDDEN = [
    ("megatron_parallel.mesh.mesh", "import megatron_models"),
    ("megatron_kernels.registry", "from megatron_parallel import ParallelLayout"),
    ("megatron_optim.clip", "import megatron_kernels"),
    ("megatron_models.models.gpt.model", "import megatron_ckpt"),
    ("megatron_data.samplers", "import torch"),
    ("megatron_data.samplers", "import nltk"),
    ("megatron_data.samplers", "import punkt"),
    ("megatron_infer.sampling", "import megatron_train"),
    ("megatron_train.trainer", "import megatron_infer"),
    ("megatron_parallel.mesh.layout", "import torch"),
    ("megatron_models.models.gpt.config", "import torch"),
]


def copy_sources(folder: Path) -> Path:
    """A copy of every package's sources and metadata, to plant faults in."""
    for package in (ROOT / "packages").iterdir():
        copy = folder / "packages" / package.name
        shutil.copytree(package / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(package / "pyproject.toml", copy)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return copy_sources(tmp_path)


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What import-linter says of a copy in which all of `FORBIDDEN` is planted."""
    folder = copy_sources(tmp_path_factory.mktemp("forbidden"))
    for module, line in FORBIDDEN:
        plant(folder, module, line)
    done = lint_imports(folder)
    assert done.returncode != 0
    return done.stdout


def plant(tree: Path, module: str, line: str) -> None:
    """Append a line to a module, named by its dotted path; the module may be new."""
    package = module.split(".", maxsplit=1)[0].replace("_", "-")
    path = tree / "packages" / package / "src" / (module.replace(".", "/") + ".py")
    path.write_text((path.read_text() if path.exists() else "") + f"\n{line}\n")


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    """import-linter over the copy."""
    sources = ":".join(str(path / "src") for path in sorted((tree / "packages").iterdir()))
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=tree,
        env={"PYTHONPATH": sources, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


def deptry(tree: Path, package: str) -> subprocess.CompletedProcess[str]:
    """Deptry over one package of the copy."""
    return subprocess.run(
        [sys.executable, ROOT / "tooling/check_dependencies.py", package, f"packages/{package}"],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_clean_copy_is_green(tree: Path) -> None:
    done = lint_imports(tree)
    assert done.returncode == 0, done.stdout
    assert deptry(tree, "megatron-optim").returncode == 0


def check_cycles(tree: Path) -> subprocess.CompletedProcess[str]:
    """The check for circles over the copy."""
    sources = sorted(str(path / "src") for path in (tree / "packages").iterdir())
    return subprocess.run(
        [sys.executable, ROOT / "tooling/check_cycles.py", *sources],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "line",
    [
        "import megatron_parallel.mesh.mesh",
        "def late():\n    from megatron_parallel.mesh import mesh",
        "if typing.TYPE_CHECKING:\n    from megatron_parallel.mesh.mesh import Mesh",
    ],
    ids=["plain", "in a function", "for type checking"],
)
def test_a_circle_of_imports_is_found(tree: Path, line: str) -> None:
    assert check_cycles(tree).returncode == 0
    plant(tree, "megatron_parallel.mesh.layout", line)
    done = check_cycles(tree)
    assert done.returncode != 0
    assert (
        "megatron_parallel.mesh.layout -> " in done.stderr
        and "megatron_parallel.mesh.mesh" in done.stderr
    )


@pytest.mark.parametrize(("module", "line"), FORBIDDEN)
def test_a_forbidden_import_is_found(complaints: str, module: str, line: str) -> None:
    imported = line.split()[1]
    pair = rf"\b{re.escape(module)} -> {re.escape(imported)}\b"
    assert re.search(pair, complaints), complaints


@pytest.mark.parametrize(
    ("package", "module", "line", "code"),
    [
        ("megatron-ckpt", "megatron_ckpt.store", "import yaml", "DEP001"),
        ("megatron-optim", "megatron_optim.clip", "import megatron_kernels", "DEP001"),
        ("megatron-data", "megatron_data.samplers", "import pytest", "DEP004"),
    ],
)
def test_an_undeclared_dependency_is_found(
    tree: Path, package: str, module: str, line: str, code: str
) -> None:
    source = tree / "packages" / package / "src" / module.split(".", maxsplit=1)[0]
    (source / "planted.py").write_text(f"{line}\n")
    done = deptry(tree, package)
    assert done.returncode != 0
    assert "planted.py" in done.stdout + done.stderr


def test_an_unused_dependency_is_found(tree: Path) -> None:
    metadata = tree / "packages/megatron-optim/pyproject.toml"
    metadata.write_text(metadata.read_text().replace('"torch>=2.11"', '"torch>=2.11", "tqdm>=4"'))
    done = deptry(tree, "megatron-optim")
    assert done.returncode != 0
    assert "DEP002" in done.stdout + done.stderr


def wheel(folder: Path, drop: str = "", requires: str = "megatron-parallel>=0.1,<0.2") -> None:
    """A small megatron_optim wheel as `hatch build` would make it, with a fault if asked."""
    metadata = Message()
    for key, value in (
        ("Metadata-Version", "2.4"),
        ("Name", "megatron-optim"),
        ("License-Expression", "Apache-2.0"),
        ("Requires-Python", ">=3.11"),
        ("Provides-Extra", "test"),
        ("Requires-Dist", requires),
    ):
        metadata[key] = value
    metadata.set_payload("words " * 100)
    files = {
        "megatron_optim/py.typed": "",
        "megatron_optim/__init__.pyi": "",
        "megatron_optim/_version.py": "",
        "megatron_optim-0.1.0.dist-info/METADATA": metadata.as_string(),
        "megatron_optim-0.1.0.dist-info/licenses/LICENSE": "",
    }
    with zipfile.ZipFile(folder / "megatron_optim-0.1.0-py3-none-any.whl", "w") as archive:
        for name, text in files.items():
            if name != drop:
                archive.writestr(name, text)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ({}, None),
        ({"drop": "megatron_optim/py.typed"}, "py.typed is missing"),
        ({"requires": "megatron-parallel==0.1.0"}, "is not a range"),
    ],
)
def test_a_faulty_wheel_is_found(tmp_path: Path, fault: dict[str, str], named: str | None) -> None:
    wheel(tmp_path, **fault)
    done = subprocess.run(
        [sys.executable, ROOT / "tooling/check_wheels.py", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if "megatron_optim-0.1.0" in line]
    assert (not lines) if named is None else any(named in line for line in lines)


def hidden_names(sources: Path) -> list[str]:
    """Public names that are those of modules beside them, which importing puts in their place."""
    found = []
    for stub in sorted(sources.rglob("__init__.pyi")):
        public = set(re.findall(r" as (\w+),?$", stub.read_text(), re.M))
        beside = {path.stem for path in stub.parent.iterdir() if path.name != stub.name}
        found += [f"{stub.parent.name}.{name}" for name in sorted(public & beside)]
    return found


def test_no_public_name_is_that_of_a_module_beside_it(tmp_path):
    assert len(list((ROOT / "packages").rglob("__init__.pyi"))) > 10
    assert hidden_names(ROOT / "packages") == []
    (tmp_path / "__init__.pyi").write_text("from .product import linear as linear\n")
    (tmp_path / "linear.py").touch()
    assert hidden_names(tmp_path) == [f"{tmp_path.name}.linear"]
