"""What is measured against transformers: outputs, bfloat16, gradients and the round trip."""

import json
from collections.abc import Sequence
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
from megatron_ckpt.families import detect_family
from megatron_infer import load_model
from megatron_models import Placement, config_of, find_kind, record_of
from megatron_parallel import Mesh, collect_shardings, parameter_views
from safetensors.torch import load_file
from torch import Tensor

from families.case import FamilyCase
from families.comparison import CAUSAL
from families.theirs import in_dtype, their_model, write, write_gradients

LIMIT = 1e-4
"""Of outputs and gradients in float32, see `error`."""

RATIO_LIMIT = 1.5
"""Of our error in bfloat16 to that of transformers; both against their model in float64."""


def error(ours: Tensor, theirs: Tensor) -> float:
    """Returns the largest difference, relative to the root mean square if that is above 1."""
    theirs = theirs.double()
    scale = max(1.0, float(theirs.square().mean().sqrt()))
    return float((ours.double() - theirs).abs().max()) / scale


def largest_error(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Returns the largest error of several outputs."""
    return max(error(*pair) for pair in zip(ours, theirs, strict=True))


def our_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Returns the model in a folder of theirs; raises CheckpointError if it is refused."""
    config = json.loads((folder / "config.json").read_text())
    kind = find_kind(detect_family(config["architectures"]).kind)
    if kind.supports_decoding:
        (model,) = load_model(folder, tokenizer=None, dtype=dtype).stages
        return model
    foreign = ForeignModel(folder)
    (built,) = kind.build(config_of(foreign.model), Placement(Mesh.single(), dtype=dtype))
    views = parameter_views(built, collect_shardings(built), Mesh.single())
    foreign.load_tensors(views, cast="floating")
    return built.eval()


def our_logits(model: Any, tokens: Tensor) -> Tensor:
    """Returns the logits ``[b, s, v]`` of a decoder."""
    (found,) = CAUSAL.ours(model, {"tokens": tokens})
    return found.unflatten(0, tuple(tokens.shape))


def logits(case: FamilyCase, changes: dict[str, Any], folder: Path) -> float:
    """Returns the error of logits, or of other outputs, in float32."""
    theirs, kind = their_model(case, changes), case.kind
    inputs = kind.inputs(theirs)
    expected = kind.theirs(theirs, inputs)
    if (size := max(float(each.abs().max()) for each in expected)) < 1:
        raise ValueError(f"outputs of {case.family} are at most {size}")
    ours = our_model(write(theirs, folder / "theirs"))
    return largest_error(kind.ours(ours, inputs), expected)


def bfloat16(case: FamilyCase, changes: dict[str, Any], folder: Path) -> float:
    """Returns the ratio of our error in bfloat16 to theirs.

    All three models have the same weights, rounded to bfloat16. The error of a token is the rms
    over its logits, and that of a model the geometric mean over tokens: where rounding makes a
    router choose other experts, the error is a hundred times that of other tokens, and an
    arithmetic mean would compare the numbers of such tokens, which are a matter of chance.
    """
    rounded, kind = in_dtype(their_model(case, changes), torch.bfloat16), case.kind
    inputs = kind.inputs(rounded, 16)
    truth = kind.theirs(in_dtype(rounded, torch.float64), inputs)
    ours = our_model(write(rounded, folder / "theirs"), torch.bfloat16)
    our, their = (
        torch.cat(
            [
                (each.double() - exact.double()).square().mean(-1).log()
                for each, exact in zip(outputs, truth, strict=True)
            ]
        )
        .mean()
        .div(2)
        .exp()
        for outputs in (kind.ours(ours, inputs), kind.theirs(rounded, inputs))
    )
    return float(our / their)


def gradients(case: FamilyCase, changes: dict[str, Any], folder: Path) -> float:
    """Returns the largest error of the gradient of any parameter.

    It is relative to the gradient's largest element, or to a hundredth of the rms of all gradients
    if that is larger: some gradients are 0 but for rounding.
    """
    theirs, kind = their_model(case, changes), case.kind
    theirs.get_input_embeddings().padding_idx = None  # else the token for padding has no gradient
    inputs = kind.inputs(theirs)
    ours = our_model(write(theirs, folder / "theirs")).train()
    kind.our_loss(ours, inputs).backward()
    kind.their_loss(theirs, inputs).backward()
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
        The largest difference of outputs between a model of theirs and the exported one.

    Raises:
        ValueError: A configuration or tensor is not the same, or transformers loads another class.
    """
    theirs = their_model(case, changes)
    return round_trip_of(case, theirs, write(theirs, folder / "theirs"), folder)


def round_trip_of(case: FamilyCase, theirs: Any, source: Path, folder: Path) -> float:
    """Does what `round_trip` does with a model of theirs and the folder that it is in.

    Returns:
        The largest difference of outputs between the model of theirs and the exported one.

    Raises:
        ValueError: A configuration or tensor is not the same, or transformers loads another class.
    """
    kind = case.kind
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
    loaded = kind.load(case, exported)
    if type(loaded).__name__ != case.model_class:
        raise ValueError(f"transformers loads {type(loaded).__name__}")
    inputs = kind.inputs(theirs)
    return largest_error(kind.theirs(loaded.eval(), inputs), kind.theirs(theirs, inputs))


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
