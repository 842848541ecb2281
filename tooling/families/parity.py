"""What is measured against transformers: logits, bfloat16, gradients and the round trip."""

from pathlib import Path
from typing import Any

import torch
from megatron_ckpt import (
    Checkpoint,
    CheckpointStore,
    ForeignModel,
    ModelRecord,
    export_hf,
    import_hf,
)
from megatron_infer import load_model
from megatron_models import GPT, record_of
from megatron_parallel import collect_shardings, parameter_views
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from families.case import FamilyCase
from families.theirs import in_dtype, their_logits, their_model, write, write_gradients

LIMIT = 1e-4
"""Of logits and gradients in float32, see `error`."""

RATIO_LIMIT = 1.5
"""Of our error in bfloat16 to that of transformers; both against their model in float64."""


def error(ours: Tensor, theirs: Tensor) -> float:
    """Returns the largest difference, relative to the root mean square if that is above 1."""
    theirs = theirs.double()
    scale = max(1.0, float(theirs.square().mean().sqrt()))
    return float((ours.double() - theirs).abs().max()) / scale


def text(vocabulary: int, batch: int = 3, length: int = 32, *, seed: int = 5) -> Tensor:
    """Returns random tokens ``[batch, length]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (batch, length), generator=generator)


def our_model(folder: Path, dtype: torch.dtype = torch.float32) -> GPT:
    """Returns the model in a folder of theirs; raises CheckpointError if it is refused."""
    (model,) = load_model(folder, tokenizer=None, dtype=dtype).stages
    assert isinstance(model, GPT)
    return model


def our_logits(model: GPT, tokens: Tensor) -> Tensor:
    """Returns logits ``[b, s, v]``."""
    with torch.no_grad():
        found: Tensor = model(tokens)[..., : model.config.vocab_size]
    return found.transpose(0, 1)


def logits(case: FamilyCase, changes: dict[str, Any], folder: Path) -> float:
    """Returns the error of logits in float32."""
    theirs = their_model(case, changes)
    tokens = text(theirs.config.vocab_size)
    expected = their_logits(theirs, tokens)
    if expected.abs().max() < 1:
        raise ValueError(f"logits of {case.family} are at most {float(expected.abs().max())}")
    ours = our_model(write(theirs, folder / "theirs"))
    return error(our_logits(ours, tokens), expected)


def bfloat16(case: FamilyCase, changes: dict[str, Any], folder: Path) -> float:
    """Returns the ratio of our error in bfloat16 to theirs.

    All three models have the same weights, rounded to bfloat16. The error of a token is the rms
    over its logits, and that of a model the geometric mean over tokens: where rounding makes a
    router choose other experts, the error is a hundred times that of other tokens, and an
    arithmetic mean would compare the numbers of such tokens, which are a matter of chance.
    """
    rounded = in_dtype(their_model(case, changes), torch.bfloat16)
    tokens = text(rounded.config.vocab_size, 16)
    truth = their_logits(in_dtype(rounded, torch.float64), tokens).double()
    ours = our_model(write(rounded, folder / "theirs"), torch.bfloat16)
    our, their = (
        (each.double() - truth).square().mean(-1).log().mean().div(2).exp()
        for each in (our_logits(ours, tokens), their_logits(rounded, tokens))
    )
    return float(our / their)


def gradients(case: FamilyCase, changes: dict[str, Any], folder: Path) -> float:
    """Returns the largest error of the gradient of any parameter.

    It is relative to the gradient's largest element, or to a hundredth of the rms of all gradients
    if that is larger: some gradients are 0 but for rounding.
    """
    theirs = their_model(case, changes)
    theirs.get_input_embeddings().padding_idx = None  # else the token for padding has no gradient
    tokens = text(theirs.config.vocab_size)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    ours = our_model(write(theirs, folder / "theirs")).train()
    ours.loss(inputs, labels).mean().backward()
    found = theirs(inputs, use_cache=False, return_dict=True).logits
    functional.cross_entropy(found.flatten(0, 1), labels.flatten()).backward()
    expected = ForeignModel(write_gradients(theirs, folder / "gradients"))
    wanted = {name: expected.read_tensor(name) for name, _ in ours.named_parameters()}
    flat = torch.cat([each.flatten() for each in wanted.values()])
    floor = 1e-2 * float(flat.square().mean().sqrt())
    worst = 0.0
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        given = wanted[name]
        inside = tuple(slice(n) for n in given.shape)
        scale = max(floor, float(given.abs().max()))
        worst = max(worst, float((parameter.grad[inside] - given).abs().max()) / scale)
    return worst


def round_trip(case: FamilyCase, changes: dict[str, Any], folder: Path) -> float:
    """Imports and exports a model of theirs, and one of ours as it is after a training.

    Returns:
        The largest difference of logits between a model of theirs and the exported one.

    Raises:
        ValueError: A configuration or tensor is not the same, or transformers loads another class.
    """
    import transformers

    theirs = their_model(case, changes)
    source = write(theirs, folder / "theirs")
    checkpoint = Checkpoint(import_hf(source, folder / "imported"))
    copied = export_hf(checkpoint, folder / "copied")
    same(tensors(source), tensors(copied), "of an imported and exported file")
    # Without their config.json the exported one is made from our configuration alone.
    ours = our_model(source)
    record = ModelRecord(family=case.family, **record_of(ours.config))
    views = parameter_views(ours, collect_shardings(ours), ours.mesh)
    CheckpointStore(folder / "trained").save(3, dict(views), model=record)
    exported = export_hf(folder / "trained", folder / "exported")
    same(tensors(source), tensors(exported), "of an exported model")
    again = Checkpoint(import_hf(exported, folder / "again"))
    before, after = (one.model.config for one in (checkpoint, again) if one.model is not None)
    if changed := {n: (v, after.get(n)) for n, v in before.items() if v != after.get(n)}:
        raise ValueError(f"fields of the configuration change: {changed}")
    names = checkpoint.tensors
    same(*({n: c.read_tensor(n) for n in names} for c in (checkpoint, again)), "imported again")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        exported, attn_implementation=case.attention, experts_implementation="eager"
    )
    if type(loaded).__name__ != case.model_class:
        raise ValueError(f"transformers loads {type(loaded).__name__}")
    tokens = text(theirs.config.vocab_size)
    return error(their_logits(loaded.eval(), tokens), their_logits(theirs, tokens))


def tensors(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors in the safetensors files of a folder."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def same(left: dict[str, Tensor], right: dict[str, Tensor], what: str) -> None:
    """Raises ValueError unless both have the same names, dtypes and values."""
    if unequal := left.keys() ^ right.keys():
        raise ValueError(f"names {what} differ: {sorted(unequal)[:5]}")
    for name, tensor in left.items():
        if tensor.dtype != right[name].dtype or not torch.equal(tensor, right[name]):
            raise ValueError(f"tensor {name!r} {what} differs")
