"""Checks a package's own environment: no undeclared sibling, and no torch for megatron-data.

Usage: python tooling/check_isolation.py megatron-data
"""

import importlib.util
import re
import sys
from importlib import metadata

OURS = ("parallel", "kernels", "models", "data", "optim", "ckpt", "infer", "train")


def declared(package: str) -> set[str]:
    """Returns the package and, transitively, our packages that it declares outside its extras."""
    found, queue = set(), [package]
    while queue:
        name = queue.pop()
        if name in found:
            continue
        found.add(name)
        for requirement in metadata.requires(name) or []:
            other = re.match(r"[A-Za-z0-9._-]+", requirement)
            if other and other[0].startswith("megatron-") and "extra ==" not in requirement:
                queue.append(other[0])
    return found


def main(package: str) -> int:
    """Prints the problems, one line each; their number is the exit status."""
    allowed = declared(package)
    wrong = []
    for short in OURS:
        module = importlib.util.find_spec(f"megatron_{short}")
        if (module is not None) != (f"megatron-{short}" in allowed):
            state = "importable but not declared" if module else "declared but not importable"
            wrong.append(f"megatron_{short} is {state}")
        elif module is not None and "site-packages" not in (module.origin or ""):
            wrong.append(f"megatron_{short} comes from {module.origin}, not from its wheel")
    if package == "megatron-data" and importlib.util.find_spec("torch"):
        wrong.append("torch is importable beside megatron-data")
    for line in wrong:
        print(f"check_isolation: error: {package}: {line}", file=sys.stderr)
    if not wrong:
        siblings = ", ".join(sorted(allowed - {package})) or "nothing of ours"
        print(f"{package} stands alone with {siblings}")
    return min(len(wrong), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
