"""Loading of a model and its tokenizer from a checkpoint or a Hugging Face model.

A checkpoint of megatron-train has everything: the configuration of the model in its manifest, the
weights, and the files of the tokenizer in the folder ``tokenizer``. A Hugging Face folder or a GGUF
file has the same in its own format, which megatron-ckpt reads without writing a checkpoint.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast, overload

import torch
from megatron_ckpt import Checkpoint, ForeignModel, ModelRecord, find_checkpoint, is_foreign_model
from megatron_data import DataError, Tokenizer, load_tokenizer
from megatron_models import (
    ConfigError,
    DecodingModel,
    ModelConfig,
    ModelKind,
    Placement,
    config_of,
    find_kind,
    stored_shapes,
)
from megatron_parallel import LayoutError, Mesh, View, collect_shardings, parameter_views
from megatron_parallel.memory import is_out_of_memory

from megatron_infer.defaults import GenerationDefaults, read_defaults
from megatron_infer.engine.generate import stop_tokens
from megatron_infer.errors import InferError

TOKENIZER_FOLDER = "tokenizer"

Source = Checkpoint | ForeignModel
StoredTokenizer = Literal["stored"]
AnyTokenizer = TypeVar("AnyTokenizer", bound=Tokenizer | None)


@dataclass(frozen=True)
class LoadedModel(Generic[AnyTokenizer]):
    """A model loaded for generation.

    Attributes:
        stages: The model. If it is sharded over ranks, all stages of this rank.
        tokenizer: The tokenizer of the checkpoint, the one passed to `load_model`, or None.
        checkpoint: The checkpoint or foreign model that was loaded.
        defaults: Settings of generation that the model brings along.
    """

    stages: tuple[DecodingModel, ...]
    tokenizer: AnyTokenizer
    checkpoint: Source
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)

    @property
    def model(self) -> DecodingModel:
        """The model. If it is sharded over ranks, the first stage of this rank."""
        return self.stages[0]

    @property
    def name(self) -> str:
        """The name for display: run and iteration, or the folder of a Hugging Face model."""
        if isinstance(self.checkpoint, ForeignModel):
            return self.checkpoint.path.resolve().name
        return f"{self.checkpoint.path.parent.name}, iteration {self.checkpoint.iteration}"

    @property
    def stop_tokens(self) -> frozenset[int]:
        """The tokens that end a text: those of the model's defaults and those of the tokenizer."""
        ends = frozenset() if self.tokenizer is None else stop_tokens(self.tokenizer)
        return self.defaults.stop_tokens | ends

    @property
    def start_token(self) -> int | None:
        """The token that starts the output for a source: that of the defaults or the tokenizer."""
        if self.defaults.start_token is not None:
            return self.defaults.start_token
        return None if self.tokenizer is None else self.tokenizer.bos_id


@overload
def load_model(
    path: str | Path,
    *,
    tokenizer: Tokenizer | StoredTokenizer = ...,
    iteration: int | None = ...,
    mesh: Mesh | None = ...,
    dtype: torch.dtype = ...,
    progress: Callable[[int, int], object] = ...,
) -> LoadedModel[Tokenizer]: ...


@overload
def load_model(
    path: str | Path,
    *,
    tokenizer: None,
    iteration: int | None = ...,
    mesh: Mesh | None = ...,
    dtype: torch.dtype = ...,
    progress: Callable[[int, int], object] = ...,
) -> LoadedModel[None]: ...


def load_model(
    path: str | Path,
    *,
    tokenizer: Tokenizer | StoredTokenizer | None = "stored",
    iteration: int | None = None,
    mesh: Mesh | None = None,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> LoadedModel[Any]:
    """Builds the model of a checkpoint, loads its weights, and opens its tokenizer.

    Everything that is read from a checkpoint is compared with the digests in its manifest: weights,
    tokenizer and chat template. A Hugging Face folder has no digests.

    On a mesh of several ranks, all of them call this function together, and each loads its shards
    of a checkpoint that any layout saved. Only the bytes of these shards are read. From a Hugging
    Face folder whole tensors are read, one at a time.

    Args:
        path: A checkpoint; the folder of a run, for its newest complete checkpoint; a Hugging Face
            folder with ``config.json`` and safetensors; or a GGUF file.
        tokenizer: The tokenizer. Defaults to ``"stored"``, the one beside the weights. None is for
            a model that only gets token ids (`generate_tokens`).
        iteration: The iteration of the run. Defaults to the newest complete one.
        mesh: The mesh of the model. Defaults to a single process on the CPU.
        dtype: The dtype of the parameters, independent of the dtype in the checkpoint. Defaults to
            float32.
        progress: Called with the bytes of weights that this rank has read so far, and their total.

    Returns:
        The model, its tokenizer and the checkpoint.

    Raises:
        CheckpointError: There is no such checkpoint or model, or it is damaged.
        InferError: The checkpoint has no record of its model, no tokenizer or a tokenizer that does
            not match; the model cannot decode; or memory is too small.
        LayoutError: The model cannot be sharded in this layout, or ranks found different
            checkpoints.
    """
    source = _open(path, iteration)
    mesh = mesh or Mesh.single()
    mesh.agree("the checkpoint to load", {"checkpoint": _identity(source)})
    if source.model is None:
        raise InferError(f"{source.path} has no record of its model; save it with a model record")
    kind = _decoding_kind(source, source.model)
    config = config_of(source.model)
    defaults = read_defaults(_files(source), source.read_file, str(source.path))
    _check_decoding(source, config, mesh)
    vocabulary = config.embedding.vocab_size
    if tokenizer == "stored":
        tokenizer = _open_tokenizer(source)
    if tokenizer is not None and tokenizer.vocab_size > vocabulary:
        raise InferError(
            f"the tokenizer of {source.path} has {tokenizer.vocab_size} tokens, but the model has "
            f"{vocabulary}; use the tokenizer of this model"
        )
    source.check_shapes(stored_shapes(config), groups=["model"])  # before memory is allocated
    stages = _empty_stages(kind, config, mesh, dtype)
    views: dict[str, list[View]] = {}
    for stage in stages:
        views |= parameter_views(stage, collect_shardings(stage), mesh)
    total, done = _stored_bytes(source, views), 0

    def count(read: int) -> None:
        nonlocal done
        done += read
        progress(done, total)

    source.load_tensors(views, cast="floating", progress=count)
    return LoadedModel(tuple(stage.eval() for stage in stages), tokenizer, source, defaults)


def _open(path: str | Path, iteration: int | None) -> Source:
    if not is_foreign_model(path):
        return find_checkpoint(path, iteration)
    if iteration is not None:
        raise InferError(
            f"{path} is a single model without iterations; leave out iteration {iteration}"
        )
    return ForeignModel(path)


def _identity(source: Source) -> str:
    """Returns a description that must be equal on all ranks."""
    if isinstance(source, ForeignModel):
        return f"{source.path.name} with digest {source.digest}"
    return f"iteration {source.iteration} with digest {source.digest}"


def _decoding_kind(source: Source, record: ModelRecord) -> ModelKind:
    """Returns the kind of the stored model; raises InferError if it does not generate tokens."""
    kind = find_kind(record.kind)
    if not kind.supports_decoding:
        raise InferError(
            f"{source.path} holds a model of kind {kind.name!r}, which does not generate text"
        )
    return kind


def _check_decoding(source: Source, config: ModelConfig, mesh: Mesh) -> None:
    """Refuses a model that cannot decode, or that the mesh cannot shard."""
    if (refusal := config.unsupported_reason("decode")) is not None:
        line = f"the model cannot generate: {refusal.setting} {refusal.reason}"
        raise InferError(f"{source.path}: {ConfigError(line, vars(config))}")
    try:
        config.check_layout(mesh.layout)
    except ConfigError as error:
        raise LayoutError(f"{source.path}: {error}") from None


def _empty_stages(
    kind: ModelKind, config: ModelConfig, mesh: Mesh, dtype: torch.dtype
) -> list[DecodingModel]:
    """Builds stages with parameters of zero, which is faster than random initialisation."""
    stages = cast(
        list[DecodingModel], kind.build(config, Placement(mesh, dtype=dtype, device="meta"))
    )
    try:
        for stage in stages:
            stage.to_empty(device=mesh.device)
        for stage in stages:  # in a second loop, because two stages may share a parameter
            with torch.no_grad():
                for parameter in stage.parameters():
                    parameter.zero_()
            stage.rotary.reset()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        tensors = [each for stage in stages for each in (*stage.parameters(), *stage.buffers())]
        size = sum(each.numel() * each.element_size() for each in tensors) / 2**30
        positions = config.embedding.max_position_embeddings
        raise InferError(
            f"the model needs {size:.1f} GiB for parameters of {dtype} and tables of {positions} "
            f"positions, more than {mesh.device} has free; shard it over more ranks or use a "
            "smaller dtype"
        ) from None
    return stages


def _stored_bytes(source: Source, views: Mapping[str, Sequence[View]]) -> int:
    """Returns the bytes of the weights that the views need, in the stored dtypes."""
    return sum(
        view.tensor.numel() * source.tensors[name].item_size
        for name, held in views.items()
        for view in held
        if name in source.tensors
    )


def _files(source: Source) -> Sequence[str]:
    """Returns the names of the files beside the weights, as in a checkpoint."""
    return list(source.files if isinstance(source, ForeignModel) else source.manifest.files)


def _open_tokenizer(source: Source) -> Tokenizer:
    names = [name for name in _files(source) if name.startswith(f"{TOKENIZER_FOLDER}/")]
    if not names:
        raise InferError(
            f"{source.path} holds no tokenizer; give one with --tokenizer-model (in Python "
            "tokenizer=...), or token ids with generate --prompt-tokens (tokenizer=None)"
        )
    if isinstance(source, Checkpoint):
        return load_tokenizer(source.verified_folder(TOKENIZER_FOLDER))
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            path = Path(folder) / name.removeprefix(f"{TOKENIZER_FOLDER}/")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(source.read_file(name))
        try:
            return load_tokenizer(folder)
        except DataError as error:
            why = str(error).replace(folder, str(source.path))
            raise InferError(
                f"{why}; give another tokenizer with --tokenizer-model and --tokenizer-type (in "
                "Python tokenizer=...)"
            ) from None
