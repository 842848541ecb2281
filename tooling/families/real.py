"""Real weights that installed packages carry, read by transformers and by megatron-infer."""

from importlib.util import find_spec
from pathlib import Path

import torch
from megatron_infer import load_model
from torch import Tensor

from families.case import FamilyCase
from families.parity import error, our_logits, text
from families.theirs import their_logits


def logits_of_real_weights(case: FamilyCase) -> float | None:
    """Returns the error of logits in float32; None without weights, or without their package."""
    if case.weights is None:
        return None
    _, package, name = case.weights
    spec = find_spec(package)  # without importing it
    if spec is None or not spec.submodule_search_locations:
        return None
    import transformers

    path = Path(spec.submodule_search_locations[0]) / name
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    tokens: Tensor = text(theirs.config.vocab_size, 2, 64)
    expected = their_logits(theirs.eval(), tokens)
    (ours,) = load_model(path, tokenizer=None).stages
    return error(our_logits(ours, tokens), expected)  # type: ignore[arg-type]
