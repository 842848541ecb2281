#!/usr/bin/env bash
# Package:   torch 2.13.0, torch.compile (Inductor) on a CPU with a C++ compiler; seen on 2026-11-28, and
#            in torch 2.15.0.
# Guess:     compiled code computes torch.frexp of float64 as of float32.
# Behaviour: the C++ code of frexp and a comparison of its mantissa compiles for float32, and not for
#            float64: the first call raises an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat >"$folder/frexp.py" <<'PY'
import torch


def next_power(x):
    """Returns the smallest power of two that is not smaller than the largest magnitude of a row."""
    mantissa, exponent = torch.frexp(x.abs().amax(-1))
    return torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())


seen = {}
for dtype in (torch.float32, torch.float64):
    x = torch.randn(64, 64, dtype=dtype)
    try:
        seen[dtype] = "equal" if torch.equal(torch.compile(next_power)(x), next_power(x)) else "wrong"
    except Exception as error:
        seen[dtype] = type(error).__name__
    torch.compiler.reset()
    print(f"torch {torch.__version__}, {dtype}: {seen[dtype]}")
expected = seen[torch.float32] == "equal" and "Error" in seen[torch.float64]
raise SystemExit(0 if expected else "the behaviour has changed")
PY
TORCHINDUCTOR_CACHE_DIR="$folder/cache" "$folder/venv/bin/python" "$folder/frexp.py"
