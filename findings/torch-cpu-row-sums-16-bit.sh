#!/usr/bin/env bash
# Package:   torch 2.13.0, on a CPU; seen on 2026-11-27.
# Guess:     a gradient that is a sum over rows is accumulated in float32, as the forward kernels do,
#            and rounded once.
# Behaviour: the backward passes of layer_norm (gain, shift), embedding and indexing add up rows in
#            bfloat16. The sum of 10,000 ones is 256 on one thread, since 256 + 1 rounds to 256.
#            index_select and the bias of linear give 9,984, the nearest number to 10,000.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PY'
import torch
from torch.nn import functional as F

rows, width = 10_000, 8
x = torch.randn(rows, width).bfloat16()
tokens = torch.zeros(rows, dtype=torch.long)


def of_ones(function, parameter):
    parameter = parameter.bfloat16().requires_grad_()
    y = function(parameter)
    (gradient,) = torch.autograd.grad(y, parameter, torch.ones_like(y))
    return gradient.flatten()[0].item()


one, table = torch.ones(width).bfloat16(), torch.ones(1, width)
seen = {
    "layer_norm, shift": of_ones(lambda b: F.layer_norm(x, (width,), one, b), torch.zeros(width)),
    "embedding, row": of_ones(lambda w: F.embedding(tokens, w), table),
    "weight[tokens], row": of_ones(lambda w: w[tokens], table),
    "index_select, row": of_ones(lambda w: w.index_select(0, tokens), table),
    "linear, bias": of_ones(lambda b: F.linear(x, torch.eye(width).bfloat16(), b), torch.zeros(width)),
}
expected = dict(zip(seen, (256.0, 256.0, 256.0, 9984.0, 9984.0)))
print(f"torch {torch.__version__}: gradients that count 10,000 rows in bfloat16")
for name, value in seen.items():
    print(f"  {name:20} {value:8.0f}   (2026-11-27: {expected[name]:.0f})")
raise SystemExit(0 if seen == expected else "the behaviour has changed")
PY
