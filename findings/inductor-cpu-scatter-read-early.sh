#!/usr/bin/env bash
# Package:   torch 2.13.0, torch.compile (Inductor) on a CPU with a C++ compiler; seen on 2026-11-28.
#            torch 2.11.0, 2.12.1 and 2.15.0 are right.
# Guess:     compiled gradients of a mixture-of-experts router differ from eager ones by rounding.
# Behaviour: they are wrong by more than a tenth, without an error, if the logits of which the weights
#            are gathered also enter a softmax and a logsumexp (the load-balancing and the z-loss): the
#            generated code reads the zeros of the gather's gradient before the gradient is added to
#            them. The same weights as a sum over a one-hot mask have the right gradient.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat >"$folder/router.py" <<'PY'
import torch
from torch.nn import functional as F

TOKENS, HIDDEN, EXPERTS, CHOSEN = 32, 32, 4, 2


def gathered(logits, experts):
    return logits.gather(1, experts)


def masked(logits, experts):
    chosen = experts[..., None] == torch.arange(EXPERTS)
    return torch.where(chosen, logits[:, None], 0.0).sum(-1)


def loss(x, weight, pick):
    logits = F.linear(x, weight)
    experts = logits.topk(CHOSEN, -1).indices
    output = pick(logits, experts).sin().sum()
    real = experts >= 0
    balance = (logits.softmax(-1) * real[:, :1]).sum(0).square().sum()
    size = (torch.logsumexp(logits, -1).square() * real[:, 0]).sum()
    return output + balance + size


def error(pick):
    torch.manual_seed(0)
    x, weight = torch.randn(TOKENS, HIDDEN), torch.randn(EXPERTS, HIDDEN) * 0.02
    inputs = x.requires_grad_(), weight.requires_grad_()
    torch.compiler.reset()
    eager = torch.autograd.grad(loss(*inputs, pick), inputs)
    compiled = torch.autograd.grad(torch.compile(loss)(*inputs, pick), inputs)
    return [float((ours - right).norm() / right.norm()) for ours, right in zip(compiled, eager)]


seen = {pick.__name__: error(pick) for pick in (gathered, masked)}
for name, (of_x, of_weight) in seen.items():
    print(f"torch {torch.__version__}, {name}: gradients of x and the weight off by {of_x:.1e}, {of_weight:.1e}")
expected = min(seen["gathered"]) > 0.1 and max(seen["masked"]) < 1e-5
raise SystemExit(0 if expected else "the behaviour has changed")
PY
TORCHINDUCTOR_CACHE_DIR="$folder/cache" "$folder/venv/bin/python" "$folder/router.py"
