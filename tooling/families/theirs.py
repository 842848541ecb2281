"""Small models of transformers with random weights."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from families.case import FamilyCase
from families.comparison import CAUSAL

SPREAD, SCALE = 0.3, 1.2
"""Standard deviation of random vectors, and of random matrices times the root of their width.

Larger weights would enlarge the rounding of float32 from layer to layer.
"""


def their_config(case: FamilyCase, changes: dict[str, Any]) -> Any:
    """Returns transformers' configuration with the case's attention and plain experts."""
    import transformers

    plain = {"attn_implementation": case.attention, "experts_implementation": "eager"}
    # A copy: transformers adds defaults to maps that it is given.
    settings = copy.deepcopy(dict(case.settings) | changes)
    return getattr(transformers, case.config_class)(**plain, **settings)


def their_model(case: FamilyCase, changes: dict[str, Any], *, seed: int = 1) -> Any:
    """Returns transformers' model with random weights in float32 and without dropout."""
    import transformers

    torch.manual_seed(seed)
    model = getattr(transformers, case.model_class)(their_config(case, changes)).eval()
    randomize(model, seed)
    return model


def randomize(model: nn.Module, seed: int) -> None:
    """Moves every weight and every stored buffer off its initial value.

    A vector moves around its initial value, so that gains are near 1, or near 0 where a family adds
    1 to them, and biases are not 0. Matrices are drawn anew.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in stored(model).items():
        if not tensor.is_floating_point():
            continue
        vector = tensor.ndim < 2 or name.endswith("bias")
        spread = SPREAD if vector else SCALE / tensor.shape[-1] ** 0.5
        noise = spread * torch.randn(tensor.shape, generator=generator)
        start = tensor.flatten()[:1].clone() if vector else torch.zeros(1)
        with torch.no_grad():
            tensor.copy_(start.clamp(0, 1).round() + noise)


def stored(model: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors that a file of the model holds; tied ones once."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(tensor.data_ptr(), (name, tensor))
    return dict(found.values())


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """Returns a copy with parameters in ``dtype``; buffers keep theirs, as after a load."""
    converted = copy.deepcopy(model)
    for parameter in converted.parameters():
        parameter.data = parameter.data.to(dtype)
    return converted


def their_logits(model: Any, tokens: Tensor) -> Tensor:
    """Returns the logits ``[b, s, v]`` of a decoder."""
    (found,) = CAUSAL.theirs(model, {"tokens": tokens})
    return found.unflatten(0, tuple(tokens.shape))


def write(model: Any, folder: Path, **changes: Any) -> Path:
    """Saves a model as transformers does, then changes fields of its ``config.json``."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # ids of special tokens are outside small vocabularies
    model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def write_gradients(model: Any, folder: Path) -> Path:
    """Saves the gradients of a model in the format of its weights.

    transformers may store weights in another shape than it computes with; it converts gradients in
    the same way.
    """
    shown = copy.deepcopy(model)
    given = dict(model.named_parameters())
    for name, parameter in shown.named_parameters():
        gradient = given[name].grad
        parameter.data = torch.zeros_like(parameter) if gradient is None else gradient.clone()
    return write(shown, folder)
