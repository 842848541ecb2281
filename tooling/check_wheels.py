"""Checks the eight wheels: metadata, licence, types, no stray files.

Usage: python tooling/check_wheels.py dist
"""

import email.parser
import sys
import zipfile
from pathlib import Path

PACKAGES = ("parallel", "kernels", "models", "data", "optim", "ckpt", "infer", "train")


def problems(wheel: Path) -> list[str]:
    """Returns the problems of one wheel, one line each."""
    name = wheel.name.split("-")[0]
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
        info = next(file for file in files if file.endswith(".dist-info/METADATA"))
        metadata = email.parser.Parser().parsestr(archive.read(info).decode())
    wrong = []
    for key, wanted in (
        ("License-Expression", "Apache-2.0"),
        ("Requires-Python", ">=3.11"),
        ("Metadata-Version", "2.4"),
    ):
        if metadata[key] != wanted:
            wrong.append(f"{key} is {metadata[key]!r}, not {wanted!r}")
    if "test" not in (metadata.get_all("Provides-Extra") or []):
        wrong.append("no extra named test")
    for needed in (f"{name}/py.typed", f"{name}/__init__.pyi", f"{name}/_version.py"):
        if needed not in files:
            wrong.append(f"{needed} is missing")
    if not any("licenses/LICENSE" in file for file in files):
        wrong.append("LICENSE is missing")
    stray = [file for file in files if not file.startswith((f"{name}/", f"{name}-"))]
    wrong += [f"{file} does not belong into it" for file in stray]
    siblings = [
        need for need in metadata.get_all("Requires-Dist") or [] if need.startswith("megatron")
    ]
    wrong += [
        f"{need!r} is not a range" for need in siblings if "<" not in need or ">=" not in need
    ]
    if len((metadata.get_payload() or "").strip()) < 400:
        wrong.append("its README is shorter than 400 characters")
    return wrong


def main(folder: str) -> int:
    """Checks every wheel in the folder and prints the problems."""
    wheels = sorted(Path(folder).glob("*.whl"))
    wrong = [f"{wheel.name}: {line}" for wheel in wheels for line in problems(wheel)]
    missing = {f"megatron_{name}" for name in PACKAGES} - {w.name.split("-")[0] for w in wheels}
    wrong += [f"no wheel of {name}" for name in sorted(missing)]
    for line in wrong:
        print(f"check_wheels: error: {line}", file=sys.stderr)
    if not wrong:
        print(f"{len(wheels)} wheels hold what they promise")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
