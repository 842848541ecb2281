"""A copy of the repository whose tests import the copied code."""

import os
import shutil
import subprocess
from pathlib import Path


class Scratch:
    """A copy in `folder` of the files that git tracks, or does not ignore, in a repository.

    Only the copy is changed. Its packages come first on `PYTHONPATH`, so tests, programs and ranks
    of a pool import them instead of the installed ones.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, root: Path, folder: Path) -> "Scratch":
        """Copies a repository."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            check=True,
            capture_output=True,
            text=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (root / name).is_file():  # a deleted file is still listed
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)
        return cls(folder)

    def again(self, folder: Path) -> "Scratch":
        """Copies the copy."""
        shutil.copytree(self.folder, folder)
        return Scratch(folder)

    def environment(self) -> dict[str, str]:
        """Returns the variables under which programs import the copied packages."""
        packages = sorted(str(path) for path in self.folder.glob("packages/*/src"))
        return {
            "PYTHONPATH": os.pathsep.join(packages),
            "OMP_NUM_THREADS": "1",  # as many runs as cores go on at once
            "PYTHONDONTWRITEBYTECODE": "",  # or every program compiles all that it imports
        }

    def write(self, name: str, text: str | None) -> None:
        """Replaces or (None) removes a file, and removes its byte code.

        Python compares byte code with its source by size and whole seconds only.
        """
        path = self.folder / name
        if text is None:
            path.unlink()
        else:
            path.write_text(text, encoding="utf-8")
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()
