"""The code that gets defects, and the tests that may catch them, as `areas.toml` says."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

AREAS = Path(__file__).with_name("areas.toml")
EVERYWHERE = (
    "integration_tests/test_frozen_values.py",
    "integration_tests/test_generated_pages.py",
)
"""Test files about every area."""


@dataclass(frozen=True)
class Area:
    """A subject of the code.

    Attributes:
        code: Patterns of its source files, relative to the repository.
        tests: Patterns of its test files among those of `nox -s tests`.
    """

    code: tuple[str, ...]
    tests: tuple[str, ...]


def areas(path: Path = AREAS) -> dict[str, Area]:
    """Returns the areas by name, in the order of the file."""
    packages = tomllib.loads(path.read_text(encoding="utf-8"))
    return {
        name: in_package(package, row)
        for package, rows in packages.items()
        for name, row in rows.items()
    }


def in_package(name: str, row: Mapping[str, Iterable[str]]) -> Area:
    """Returns an area of one package."""
    package = f"packages/{name}"
    source = f"{package}/src/{name.replace('-', '_')}"
    return Area(
        tuple(f"{source}/{pattern}" for pattern in row["code"]),
        (
            *(f"{package}/tests/test_{pattern}.py" for pattern in row["tests"]),
            *(f"integration_tests/{pattern}.py" for pattern in row.get("integration", ())),
            *(f"integration_tests/parity/test_{other}.py" for other in row.get("parity", ())),
            *EVERYWHERE,
        ),
    )


def sources(root: Path) -> dict[str, list[str]]:
    """Returns the source files of every area, relative to `root`; each file is in one area."""
    taken: set[str] = set()
    found = {}
    for name, area in areas().items():
        found[name] = [path for path in matching(root, area.code) if path not in taken]
        taken.update(found[name])
    return found


def test_files(root: Path, name: str) -> list[str]:
    """Returns the test files of an area, relative to `root`."""
    return matching(root, areas()[name].tests)


def other_test_files(root: Path, name: str) -> list[str]:
    """Returns the test files of the area's package that are not among those of the area."""
    listed = areas()[name]
    folders = {pattern.rpartition("/")[0] for pattern in listed.tests if "packages/" in pattern}
    every = matching(root, tuple(f"{folder}/test_*.py" for folder in sorted(folders)))
    own = set(matching(root, listed.tests))
    return [path for path in every if path not in own]


def integration_files(root: Path) -> list[str]:
    """Returns all integration tests, relative to `root`."""
    return matching(root, ("integration_tests/test_*.py",))


def matching(root: Path, patterns: tuple[str, ...]) -> list[str]:
    """Returns files that match, in the order of the patterns, without duplicates."""
    paths = [path for pattern in patterns for path in sorted(root.glob(pattern))]
    return list(dict.fromkeys(path.relative_to(root).as_posix() for path in paths))
