#!/usr/bin/env bash
# Package:   torch 2.13.0, torch.compile (Inductor) of FlexAttention on a CPU with a C++ compiler; seen on
#            2026-11-28. Torch 2.15.0 raises another error, without torch.compile too.
# Guess:     a score function may capture a Python number, such as a soft-cap: another number compiles
#            again.
# Behaviour: the first call is right. A call whose score function captures another number makes the number
#            a symbol, and raises an error. A captured tensor of one element may change.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat >"$folder/capped.py" <<'PY'
import torch
from torch.nn.attention.flex_attention import flex_attention

q = torch.randn(1, 2, 8, 16)


def capped(cap):
    """Returns a score function that bounds scores by cap."""
    return lambda score, batch, head, query, key: cap * torch.tanh(score / cap)


seen = {}
for kind, make in (("number", float), ("tensor", torch.tensor)):
    torch.compiler.reset()
    attend = torch.compile(flex_attention)
    for cap in (2.0, 3.0):
        scores = q @ q.transpose(-1, -2) / 4
        expected = (cap * torch.tanh(scores / cap)).softmax(-1) @ q
        try:
            found = attend(q, q, q, score_mod=capped(make(cap)))
            seen[kind, cap] = "right" if torch.allclose(found, expected, atol=1e-5) else "wrong"
        except Exception as error:
            seen[kind, cap] = type(error).__name__
        print(f"torch {torch.__version__}, {kind} {cap}: {seen[kind, cap]}")
results = list(seen.values())
expected = results[0] == results[2] == results[3] == "right" and "Error" in results[1]
raise SystemExit(0 if expected else "the behaviour has changed")
PY
TORCHINDUCTOR_CACHE_DIR="$folder/cache" "$folder/venv/bin/python" "$folder/capped.py"
