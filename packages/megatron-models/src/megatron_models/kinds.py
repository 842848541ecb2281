"""Kinds of models, found by the entry-point group ``megatron.models``.

Who trains, converts or serves a model looks its kind up by the name that a command or a
checkpoint's record gives, and knows no kind by name. Importing this module does not import torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_parallel.extensions import Extensions

from megatron_models.errors import ConfigError
from megatron_models.lookup import import_object
from megatron_models.models.model_config import ModelConfig

if TYPE_CHECKING:
    from torch import nn

KINDS = Extensions("megatron.models", "kind of model", ConfigError)
"""Kinds of models by name, those of other distributions too."""

Migration = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""From the fields of one version of a kind's configurations to those of the next."""


@dataclass(frozen=True)
class ModelKind:
    """A kind of models: its configuration, how its stages are built, and what it is trained for.

    Attributes:
        name: under which commands and checkpoints know it; that of its entry point.
        config: the class of its configurations.
        stages: ``package.module:function`` that builds this rank's stages of a pipeline; called
            with the configuration, a `megatron_models.Placement`, and the keywords ``split`` and
            ``seed``. It is imported when a model is built, and torch with it.
        default_task: name of the task that it is pretrained for.
        summary: one line for lists and ``--help``.
        supports_decoding: whether it generates token by token, with a cache
            (`megatron_models.DecodingModel`).
        migrations: at each place, what makes the fields of the next version of configurations from
            those of this version; there are as many as versions before the one written now.
    """

    name: str
    config: type[ModelConfig]
    stages: str
    default_task: str
    summary: str
    supports_decoding: bool = False
    migrations: tuple[Migration, ...] = ()

    @property
    def version(self) -> int:
        """The version of configurations that are written now."""
        return len(self.migrations)

    def read(self, fields: Mapping[str, Any], version: int) -> ModelConfig:
        """Returns the configuration that fields of a version stand for.

        Raises:
            ConfigError: a newer version, or fields that are no configuration.
        """
        if version > self.version:
            raise ConfigError(
                f"the configuration of a model of kind {self.name!r} has version {version}, and "
                f"what is installed here reads up to {self.version}: use a newer one"
            )
        for migrate in self.migrations[version:]:
            fields = migrate(fields)
        return self.config.from_dict(fields)

    def build(self, config: ModelConfig, placement: Any, **options: Any) -> "list[nn.Module]":
        """Builds this rank's stages of a model.

        Args:
            config: of this kind.
            placement: a `megatron_models.Placement`, or a mesh.
            **options: ``split``, the layers of every stage of the pipeline, and ``seed``.
        """
        build: Callable[..., list[nn.Module]] = import_object(
            self.stages, f"stages of the kind {self.name!r}"
        )
        return build(config, placement, **options)

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the components that its configuration is composed of."""
        bases = [
            base for base in reversed(self.config.__mro__) if ".components." in base.__module__
        ]
        names = (base.__name__.removesuffix("Config") for base in bases)
        return tuple(name for name in names if name != "Component")


def model_kinds() -> dict[str, ModelKind]:
    """Returns every installed kind by name, other distributions' too."""
    return {name: find_kind(name) for name in KINDS.entries()}


def find_kind(name: str) -> ModelKind:
    """Returns an installed kind.

    Raises:
        ConfigError: there is none of that name.
    """
    return KINDS.load_instance(name, ModelKind)
