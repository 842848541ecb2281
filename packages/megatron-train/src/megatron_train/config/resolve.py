"""From a command line to a checked configuration: collects values, derives others, builds it."""

import argparse
import os
from dataclasses import replace
from pathlib import Path

from megatron_data.datasets import is_conversation_file
from megatron_parallel.pipeline import count_stages

from megatron_train.config.data import (
    DATA_PATHS,
    INDEPENDENT_DOCUMENTS,
    NULL_TOKENIZERS,
    DataConfig,
)
from megatron_train.config.extensions import derived_by_task
from megatron_train.config.files import read_file
from megatron_train.config.flags import LAYERS_PER_VIRTUAL_STAGE, given_flags, implied_flags
from megatron_train.config.from_checkpoint import (
    CHECKPOINT_ORIGIN,
    TOKENIZER_SETTINGS,
    model_of,
    with_model_of,
)
from megatron_train.config.recipes import RECIPE_ORIGIN, recipe_values
from megatron_train.config.run import RunConfig, build_run
from megatron_train.config.run_sections import DEFAULT_KIND, run_options
from megatron_train.config.unread_settings import without_unread_settings_of_recipe
from megatron_train.config.values import GivenValue, Values
from megatron_train.errors import TrainError, UsageError
from megatron_train.tokenizer import TokenizerCache


def resolve(
    namespace: argparse.Namespace,
    world_size: int | None = None,
    tokenizers: TokenizerCache | None = None,
) -> tuple[RunConfig, Values]:
    """Returns the configuration of a run and the values it is built from.

    Args:
        namespace: The parsed command line.
        world_size: Number of ranks. Defaults to ``WORLD_SIZE`` of the environment, or 1.
        tokenizers: Keeps the tokenizer that is opened for the size of the vocabulary.

    Raises:
        TrainError: A value cannot be used; the message names it as it was given.
        UsageError: A required value is missing.
    """
    kind: str = namespace.kind
    options = run_options(kind)
    values = Values()
    if namespace.recipe is not None:
        values = recipe_values(namespace.recipe, options, kind)
    if namespace.config is not None:
        values = values.updated(read_file(Path(namespace.config), options, kind))
    return complete(values, namespace, kind, world_size, tokenizers)


def complete(
    values: Values,
    namespace: argparse.Namespace,
    kind: str,
    world_size: int | None = None,
    tokenizers: TokenizerCache | None = None,
) -> tuple[RunConfig, Values]:
    """Returns the configuration of a run, and ``values`` with flags and derived values added.

    Args:
        values: Values from files.
        namespace: The parsed command line; its flags override ``values``.
        kind: Kind of the model.
        world_size: Number of ranks. Defaults to ``WORLD_SIZE`` of the environment, or 1.
        tokenizers: Keeps the tokenizer that is opened for the size of the vocabulary.

    Raises:
        TrainError: A value cannot be used; the message names it as it was given.
        UsageError: A required value is missing.
    """
    values = _with_described_stages(with_flags(values, namespace, kind))
    values = derive(values, kind, tokenizers)
    config = build_run(values, world_size or world_size_from_environment(), kind)
    given = values.given.get("checkpoint.model_family")
    if given is not None and given.origin.startswith(RECIPE_ORIGIN):
        config = _without_strange_family(config, given.value)
    return config, values


def _without_strange_family(config: RunConfig, name: str) -> RunConfig:
    """Returns the run without the family of its recipe, if the model does not fit that family."""
    from megatron_ckpt import find_family

    if not find_family(name).differences(config.model):
        return config
    return replace(config, checkpoint=replace(config.checkpoint, model_family=None))


def with_flags(values: Values, namespace: argparse.Namespace, kind: str = DEFAULT_KIND) -> Values:
    """Returns ``values`` overridden by those of a parsed command line.

    Args:
        values: Values to override.
        namespace: The parsed command line.
        kind: Kind of the model that the command line has flags of.

    Raises:
        UsageError: The value of a flag cannot be used.
    """
    options = run_options(kind)
    values = values.updated(given_flags(namespace, options))
    for key, implied in implied_flags(namespace, options).given.items():
        values = values.with_derived(key, implied.value, implied.origin)
    return with_virtual_stages(values, namespace)


def world_size_from_environment() -> int:
    """Returns the number of ranks in ``WORLD_SIZE``, which torchrun sets; 1 without it.

    Raises:
        UsageError: ``WORLD_SIZE`` is not a positive integer.
    """
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"WORLD_SIZE={text} in the environment is not a number of ranks; unset it")
    return int(text)


def derive(
    values: Values, kind: str = DEFAULT_KIND, tokenizers: TokenizerCache | None = None
) -> Values:
    """Adds values that follow from others: of the checkpoint's model, the task, the tokenizer."""
    if values.get("checkpoint.use_checkpoint_args"):
        values = _with_model_of_checkpoint(values, kind)
    values = without_unread_settings_of_recipe(derived_by_task(values, kind), kind)
    values = _with_whole_conversations(values)
    seq_length = values.get("data.seq_length")
    if seq_length is not None:
        values = values.with_derived("model.max_position_embeddings", seq_length, "--seq-length")
        values = _with_vocabulary(values, tokenizers or TokenizerCache())
    return values


def with_virtual_stages(values: Values, namespace: argparse.Namespace) -> Values:
    """Converts the number of layers per virtual stage to virtual stages per rank.

    Args:
        values: The given values, with ``model.num_layers``.
        namespace: The parsed command line.

    Raises:
        UsageError: The layers do not divide, or the number of virtual stages is given, too.
    """
    name = LAYERS_PER_VIRTUAL_STAGE.removeprefix("--").replace("-", "_")
    layers_each: str | None = getattr(namespace, name, None)
    layers, stages = values.get("model.num_layers"), values.get("layout.pp") or 1
    if layers_each is None or layers is None:
        return values
    flag = f"{LAYERS_PER_VIRTUAL_STAGE} {layers_each}"
    if not layers_each.isdecimal() or int(layers_each) < 1:
        raise UsageError(f"{LAYERS_PER_VIRTUAL_STAGE} needs a positive number, got {layers_each!r}")
    other = values.given.get("layout.vpp")
    if other is not None and other.origin.startswith("--"):
        raise UsageError(f"{flag} and {other.origin} exclude each other; give one")
    if layers % (stages * int(layers_each)):
        raise UsageError(
            f"{flag} does not divide {layers} layers on {stages} pipeline ranks; change one of them"
        )
    count = layers // (stages * int(layers_each))
    return values.updated(Values({"layout.vpp": GivenValue(count, LAYERS_PER_VIRTUAL_STAGE)}))


def _with_described_stages(values: Values) -> Values:
    """Sets the number of virtual stages if a description of all stages is given."""
    text, pipeline = values.get("pipeline.stages"), values.get("layout.pp") or 1
    if text is None or pipeline == 1 or (count := count_stages(text)) % pipeline:
        return values
    return values.with_derived("layout.vpp", count // pipeline, "--pipeline-model-parallel-layout")


def _with_vocabulary(values: Values, tokenizers: TokenizerCache) -> Values:
    """Sets the size of the vocabulary to that of the tokenizer, unless it is given."""
    key = "model.vocab_size"
    given = values.given.get(key)
    kind = values.get("data.tokenizer_type")
    if kind in NULL_TOKENIZERS:
        if given is None:
            raise UsageError(f"--tokenizer-type {kind} needs --vocab-size")
        if given.origin.startswith(CHECKPOINT_ORIGIN):  # includes the end-of-document token
            return values
        whole = GivenValue(given.value + 1, f"{given.origin}, and the end-of-document token")
        return values.updated(Values({key: whole}))
    if given is not None or not any(f"data.{name}" in values.given for name in TOKENIZER_SETTINGS):
        return values
    tokenizer = tokenizers.open(DataConfig(**values.section("data")))
    if tokenizer is None:
        return values
    return values.with_derived(key, tokenizer.vocab_size, "the tokenizer")


def _with_whole_conversations(values: Values) -> Values:
    """Sets what keeps conversations whole and independent of each other, unless it is given."""
    if not values.get("data.sft"):
        return values
    for name in INDEPENDENT_DOCUMENTS:
        values = values.with_derived(f"data.{name}", True, "--sft")
    lists = [values.get(f"data.{name}") or () for name in DATA_PATHS]
    paths = [path for given in lists for path in ([given] if isinstance(given, str) else given)]
    if any(is_conversation_file(path) for path in paths):
        return values.with_derived("data.sample_order", "compat", "--sft with JSON lines")
    return values.with_derived("data.sample_order", "packed", "--sft")


def _with_model_of_checkpoint(values: Values, kind: str) -> Values:
    """Takes missing settings of the model from the checkpoint to load."""
    from megatron_ckpt import Checkpoint, CheckpointError, find_checkpoint

    folders = [values.get("checkpoint.load"), values.get("checkpoint.pretrained_checkpoint")]
    found: Checkpoint | None = None
    reason = ""
    for folder in filter(None, folders):
        try:
            found = found or find_checkpoint(folder)
        except CheckpointError as error:
            reason = str(error)
    if found is None:
        raise TrainError(f"--use-checkpoint-args: no checkpoint to take the model from: {reason}")
    model = model_of(found, "--use-checkpoint-args")
    if model.kind != kind:
        raise TrainError(
            f"--use-checkpoint-args: {found.path} holds a model of kind {model.kind}; train it "
            f"with megatron-train pretrain {model.kind}"
        )
    return with_model_of(values, found, model)
