#!/usr/bin/env bash
# Package:   torch 2.13.0, on a CPU of the AMD EPYC 7003 series (AVX2); seen on 2026-11-28.
# Guess:     a query that holds NaN or an infinity gives an output row of NaN, as softmax(q @ k^T) @ v
#            does, for every number of keys and on every CPU.
# Behaviour: scaled_dot_product_attention returns zeros, by the number of keys: in float32 for a NaN
#            and fewer than 8 keys, in bfloat16 for an infinity and 8 keys, but not 9. With
#            instructions older than AVX2 the infinity gives NaN, so the result depends on the CPU.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat > "$folder/rows.py" <<'PY'
import torch
from torch.nn import functional as F


def row(value, keys, dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 16, generator=generator).to(dtype) for n in (4, keys, keys))
    q[0, 0, 1, 3] = value
    plain = (torch.softmax(q @ k.mT / 4, -1) @ v)[0, 0, 1]
    assert plain.isnan().all(), "the formula gives NaN"
    out = F.scaled_dot_product_attention(q, k, v)[0, 0, 1]
    return "NaN" if out.isnan().all() else "zeros" if not out.any() else "numbers"


cases = [(torch.nan, n, torch.float32) for n in (7, 8)]
cases += [(torch.inf, n, torch.bfloat16) for n in (8, 9)]
print(", ".join(f"{value} and {keys} keys: {row(value, keys, d)}" for value, keys, d in cases))
PY
status=0
expect() {
  seen=$(ATEN_CPU_CAPABILITY=$1 "$folder/venv/bin/python" "$folder/rows.py")
  echo "torch 2.13.0, $1: $seen"
  [ "$seen" = "$2" ] || { echo "  the behaviour has changed; 2026-11-28: $2"; status=1; }
}
expect avx2 "nan and 7 keys: zeros, nan and 8 keys: NaN, inf and 8 keys: zeros, inf and 9 keys: NaN"
expect default "nan and 7 keys: zeros, nan and 8 keys: NaN, inf and 8 keys: NaN, inf and 9 keys: NaN"
exit $status
