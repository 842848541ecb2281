"""Checks that every console script answers --help and --version, quickly and without torch.

Usage: ENVIRONMENT/bin/python tooling/check_commands.py
"""

import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

SCRIPTS = ("megatron-train", "megatron-data", "megatron-ckpt", "megatron-infer", "megatron-kernels")


def check(script: str) -> list[str]:
    """Returns the problems of one command, one line each."""
    path = Path(sys.executable).with_name(script)
    if not path.exists():
        return [f"{script} is not installed"]
    wrong = []
    for flag, wanted in (("--help", "usage:"), ("--version", metadata.version(script))):
        started = time.monotonic()
        done = subprocess.run([path, flag], capture_output=True, text=True, check=False)
        seconds = time.monotonic() - started
        print(f"{script} {flag}: {seconds:.2f} s")
        if done.returncode or wanted not in done.stdout:
            wrong.append(
                f"{script} {flag} exits {done.returncode}: {(done.stderr or done.stdout)[-300:]}"
            )
    nothing = subprocess.run([path], capture_output=True, text=True, check=False)
    if nothing.returncode != 2:
        wrong.append(f"{script} alone exits {nothing.returncode}, not 2")
    module = script.replace("-", "_")
    code = f"import sys, {module}.cli; sys.exit('torch' in sys.modules)"
    loads = subprocess.run([sys.executable, "-c", code], check=False)
    if loads.returncode:
        wrong.append(f"importing the command of {script} imports torch")
    return wrong


def main() -> int:
    """Checks every console script."""
    wrong = [line for script in SCRIPTS for line in check(script)]
    for line in wrong:
        print(f"check_commands: error: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
