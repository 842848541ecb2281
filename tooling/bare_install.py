"""Makes the eight packages importable from their source folders, with metadata.

Nothing is installed:

    eval "$(python3 tooling/bare_install.py FOLDER)"

For each package this writes a minimal ``.dist-info`` (name, version, requirements, entry points)
and its commands into FOLDER, and prints shell lines that put FOLDER and the ``src`` folders on
PYTHONPATH and PATH. It reports on stderr what is missing on this machine and what cannot be tested,
and puts the test folders that can run into TEST_FOLDERS. Needs only Python 3.11.
"""

import argparse
import re
import shlex
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

# Stands in where beartype is missing: conftests name it when they install jaxtyping's hook.
NO_BEARTYPE = '''"""Checks nothing: beartype is not installed on this machine."""


def beartype(checked=None, **settings):
    return checked
'''


@dataclass(frozen=True)
class Package:
    """The contents of a package's pyproject.toml and version file that are used here."""

    folder: Path
    name: str
    version: str
    requirements: tuple[str, ...]
    test_requirements: tuple[str, ...]
    entry_points: dict[str, dict[str, str]]

    @classmethod
    def read(cls, folder: Path) -> "Package":
        """Reads the package in ``folder``."""
        project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        name = project["name"]
        version_file = folder / "src" / name.replace("-", "_") / "_version.py"
        version = re.search(r'__version__ = "([^"]+)"', version_file.read_text())
        if version is None:
            raise ValueError(f'{version_file}: no line __version__ = "..."')
        groups = dict(project.get("entry-points", {}))
        if "scripts" in project:
            groups["console_scripts"] = project["scripts"]
        return cls(
            folder,
            name,
            version[1],
            tuple(project.get("dependencies", ())),
            tuple(project.get("optional-dependencies", {}).get("test", ())),
            groups,
        )

    def write(self, site: Path) -> None:
        """Writes the package's ``.dist-info`` and its commands below ``site``."""
        stem = self.name.replace("-", "_")
        info = site / f"{stem}-{self.version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.4", f"Name: {self.name}", f"Version: {self.version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in self.requirements]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        (info / "entry_points.txt").write_text(
            "\n".join(
                f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in names.items())
                for group, names in self.entry_points.items()
            )
        )
        for script, target in self.entry_points.get("console_scripts", {}).items():
            module, _, function = target.partition(":")
            path = site / "bin" / script
            path.parent.mkdir(exist_ok=True)
            path.write_text(
                f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\n"
                f"sys.exit({function}())\n"
            )
            path.chmod(0o755)


def distribution(requirement: str) -> str:
    """Returns the name in a requirement, without versions, extras and markers."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    if match is None:
        raise ValueError(f"{requirement!r} names no distribution")
    return match[0].lower()


def absent(requirements: Iterable[str]) -> list[str]:
    """Returns the third-party distributions that are not installed."""
    missing = set()
    for name in map(distribution, requirements):
        if not name.startswith("megatron-"):
            try:
                metadata.version(name)
            except metadata.PackageNotFoundError:
                missing.add(name)
    return sorted(missing)


def needed(package: Package, packages: dict[str, Package]) -> set[str]:
    """Returns the requirements of a package and of the siblings that it requires."""
    found, queue = set(), [package]
    while queue:
        for requirement in queue.pop().requirements:
            if requirement not in found:
                found.add(requirement)
                sibling = packages.get(distribution(requirement))
                if sibling is not None:
                    queue.append(sibling)
    return found


def testable(packages: dict[str, Package]) -> list[str]:
    """Returns the test folders that can run here; reports on stderr why others cannot."""
    folders = []
    for package in packages.values():
        tests = package.folder / "tests"
        missing = absent(needed(package, packages))
        if missing:
            say(f"{package.name} is not tested: {', '.join(missing)} not installed")
        elif tests.is_dir():
            folders.append(str(tests.relative_to(ROOT)))
    if (ROOT / "integration_tests").is_dir():
        folders.append("integration_tests")
    return folders


def say(line: str) -> None:
    print(f"bare_install: {line}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bare_install", description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path, help="an empty folder to write into")
    site: Path = parser.parse_args().site.resolve()
    found = [Package.read(path.parent) for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
    packages = {package.name: package for package in found}
    for package in found:
        package.write(site)

    tools = absent(requirement for package in found for requirement in package.test_requirements)
    if "pytest" in tools:
        say(f"error: pytest is not installed for {sys.executable}; nothing can be tested")
        return 1
    if "beartype" in tools:
        (site / "beartype.py").write_text(NO_BEARTYPE)
        say("beartype is not installed: shape annotations are not checked in this run")
    for name in tools:
        if name != "beartype":
            say(f"{name} is not installed: test files that import it are skipped")
    settings = {
        "PYTHONPATH": ":".join(str(path) for path in (site, *(p.folder / "src" for p in found))),
        "PATH": str(site / "bin"),
    }
    for variable, value in settings.items():
        print(f"export {variable}={shlex.quote(value)}${{{variable}:+:${variable}}}")
    print(f"TEST_FOLDERS={shlex.quote(' '.join(testable(packages)))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
