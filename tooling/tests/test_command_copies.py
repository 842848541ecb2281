"""The manner that all commands share is one file, of which each package with a command has a copy.

No package with a command needs another one for it, and eight packages are enough.
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = "[project.scripts]"


def test_every_package_with_a_command_has_the_same_file() -> None:
    projects = ROOT.glob("packages/*/pyproject.toml")
    folders = [project.parent for project in projects if SCRIPTS in project.read_text()]
    copies = [
        folder / "src" / folder.name.replace("-", "_") / "_command.py" for folder in sorted(folders)
    ]
    first, *others = copies
    different = [str(copy) for copy in others if copy.read_bytes() != first.read_bytes()]
    assert others and not different, f"differ from {first}; copy the one that is right over all"
