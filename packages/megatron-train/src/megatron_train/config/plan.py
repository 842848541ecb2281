"""From the command line of a plan to the sections of a run, without data and lengths."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from megatron_models import ConfigError

from megatron_train.config.data import DATA_PATHS
from megatron_train.config.extensions import SelectedExtensions
from megatron_train.config.files import read_file
from megatron_train.config.model_checks import check_features, check_model_layout
from megatron_train.config.recipes import recipe_values
from megatron_train.config.resolve import derive, with_flags
from megatron_train.config.run import build_sections
from megatron_train.config.run_sections import RunSections, named_by_flags, run_options
from megatron_train.config.values import GivenValue, Values
from megatron_train.errors import TrainError, UsageError

_CORPUS = ("synthetic",)
_ORIGIN = "the plan"


def resolve_plan(namespace: argparse.Namespace) -> RunSections:
    """Returns the sections of the run that a command line describes.

    Args:
        namespace: The parsed command line.

    Raises:
        TrainError: A value cannot be used; the message names it as it was given.
        UsageError: The model or the length of samples is missing.
    """
    kind: str = namespace.kind
    values = described_values(namespace).with_derived("training.micro_batch_size", 1, _ORIGIN)
    if values.get("training.train_samples") is None:
        values = values.with_derived("training.train_iters", 1, _ORIGIN)
    values = derive(with_corpus(values, _ORIGIN), kind)
    selected = SelectedExtensions.from_values(values, kind)
    missing = [
        option.flag
        for option in values.missing(run_options(kind, selected))
        if option.section in ("model", "data") and option.key != "model.max_position_embeddings"
    ]
    if missing:
        raise UsageError(
            f"missing: {', '.join(missing)}; give them as flags, or the model by --recipe, "
            "--hf-config or --config"
        )
    planned = RunSections(**build_sections(values, requested_ranks(namespace), kind, selected))
    with named_by_flags("pipeline"):
        layout = planned.pipeline.resolve_layout(planned.layout)
    planned = dataclasses.replace(planned, layout=layout)
    check_model_layout(planned.model, planned.layout, planned.placement)
    check_features(planned)
    return planned


def described_values(namespace: argparse.Namespace) -> Values:
    """Returns the values of recipe, model file, settings file and flags of a command line.

    Raises:
        TrainError: A value cannot be used; the message names it as it was given.
    """
    kind: str = namespace.kind
    options = run_options(kind)
    values = Values()
    if namespace.recipe is not None:
        values = recipe_values(namespace.recipe, options, kind)
    if namespace.hf_config is not None:
        values = values.updated(_hf_values(Path(namespace.hf_config), kind))
    if namespace.config is not None:
        values = values.updated(read_file(Path(namespace.config), options, kind))
    return with_flags(values, namespace, kind)


def with_corpus(values: Values, origin: str) -> Values:
    """Returns values that name a corpus, without which settings of the data are refused.

    Args:
        values: The given values.
        origin: What adds the corpus if none is given.
    """
    if any(values.get(f"data.{name}") for name in ("mock_data", *DATA_PATHS)):
        return values
    return values.with_derived("data.data_path", _CORPUS, origin)


def requested_ranks(namespace: argparse.Namespace) -> int | None:
    """Returns the value of --world-size or --nproc-per-node; None without them.

    Raises:
        UsageError: It is not a positive integer.
    """
    for flag in ("world_size", "nproc_per_node"):
        text = getattr(namespace, flag)
        if text is not None and (not text.isdecimal() or int(text) < 1):
            name = flag.replace("_", "-")
            raise UsageError(f"--{name} needs a positive integer, got {text!r}")
    text = namespace.world_size or namespace.nproc_per_node
    return None if text is None else int(text)


def _hf_values(path: Path, kind: str) -> Values:
    """Returns the model of a ``config.json`` as values."""
    from megatron_ckpt import CheckpointError, detect_family, without_quantization

    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainError(f"--hf-config {path}: {error.strerror}") from None
    except ValueError as error:
        raise TrainError(f"--hf-config {file}: not JSON: {error}") from None
    try:
        family = detect_family(content.get("architectures") or [])
        config: Any = family.config_from_hf(without_quantization(content, str(file)))
    except (CheckpointError, ConfigError, AttributeError) as error:
        raise TrainError(f"--hf-config {file}: {error}") from None
    if family.kind != kind:
        raise TrainError(
            f"--hf-config {file} is a model of kind {family.kind}, not {kind}; give "
            f"{family.kind} instead of {kind}"
        )
    origin = f"--hf-config {file}"
    given = {f"model.{name}": GivenValue(value, origin) for name, value in config.to_dict().items()}
    return Values(given)
