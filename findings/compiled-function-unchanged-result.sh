#!/usr/bin/env bash
# Package:   torch 2.11.0, torch.compile on a CPU; seen on 2026-11-28. torch 2.12.0 and 2.13.0 are right.
# Guess:     the gradient of a compiled autograd.Function is that of its backward pass.
# Behaviour: it is zero, without an error, if the forward pass returns a tensor that .to(dtype) has left
#            as it is. With any operation or view after it, the gradient is right. Linux: 3 GB to install.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.11.0 numpy==2.4.6
cat >"$folder/unchanged.py" <<'PY'
import torch


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, view):
        result = (x * 2).to(x.dtype)
        return result.view_as(result) if view else result

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


def gradient(view, compiled):
    x = torch.ones(3, requires_grad=True)

    def total(x):
        return Doubled.apply(x * 5, view).sum()

    torch.compiler.reset()
    run = torch.compile(total, backend="aot_eager", fullgraph=True) if compiled else total
    return torch.autograd.grad(run(x), x)[0].tolist()


seen = {(v, c): gradient(v, c) for v in (False, True) for c in (False, True)}
for (view, compiled), values in seen.items():
    how = "compiled" if compiled else "eager"
    print(f"torch {torch.__version__}, {how}, {'a view' if view else 'no view'} of it: {values}")
right = [seen[key] == [10.0] * 3 for key in ((False, False), (True, False), (True, True))]
expected = all(right) and seen[False, True] == [0.0] * 3
raise SystemExit(0 if expected else "the behaviour has changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/unchanged.py"
