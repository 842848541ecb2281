"""Kinds of models, found through the entry-point group ``megatron.models``.

Code that trains, converts or serves a model looks its kind up by the name in a command or in a
checkpoint's record. It refers to no kind directly. Importing this module does not import torch.
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
"""Kinds of models by name, including those of other distributions."""

Migration = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Maps the fields of one version of configurations to those of the next."""


@dataclass(frozen=True)
class ModelKind:
    """A kind of model: its configuration, the builder of its stages, and its default task.

    Attributes:
        name: Name in commands and checkpoints, and of the entry point.
        config: Class of its configurations.
        stages: ``package.module:function`` that builds this rank's pipeline stages. It is called
            with the configuration, a `megatron_models.Placement`, and the keywords ``split`` and
            ``seed``. It is imported, and torch with it, when a model is built.
        default_task: Name of the task for pretraining.
        summary: One line for lists and ``--help``.
        supports_decoding: Whether it generates token by token with a cache
            (`megatron_models.DecodingModel`).
        migrations: Migrations of configurations; index ``i`` maps version ``i`` to ``i + 1``.
        former_names: Names that older checkpoints have for the kind.
    """

    name: str
    config: type[ModelConfig]
    stages: str
    default_task: str
    summary: str
    supports_decoding: bool = False
    migrations: tuple[Migration, ...] = ()
    former_names: tuple[str, ...] = ()

    @property
    def version(self) -> int:
        """Current version of configurations."""
        return len(self.migrations)

    def read(self, fields: Mapping[str, Any], version: int) -> ModelConfig:
        """Returns the configuration for the fields of a version.

        Raises:
            ConfigError: The version is newer than the current one, or the fields are no valid
                configuration.
        """
        if version > self.version:
            raise ConfigError(
                f"the configuration of a model of kind {self.name!r} has version {version}, but "
                f"the installed package reads up to version {self.version}; install a newer one"
            )
        for migrate in self.migrations[version:]:
            fields = migrate(fields)
        return self.config.from_dict(fields)

    def build(self, config: ModelConfig, placement: Any, **options: Any) -> "list[nn.Module]":
        """Builds this rank's stages of a model.

        Args:
            config: A configuration of this kind.
            placement: A `megatron_models.Placement`, or a mesh.
            **options: ``split``, the layers of each pipeline stage, and ``seed``.
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
        names = [base.__name__ for base in bases if base.__name__.endswith("Config")]
        return tuple(name.removesuffix("Config") for name in names if name != "ComponentConfig")


def model_kinds() -> dict[str, ModelKind]:
    """Returns every installed kind by name, including those of other distributions."""
    return KINDS.load_instances(ModelKind)


def find_kind(name: str) -> ModelKind:
    """Returns an installed kind by its name, or by one that it had before.

    Raises:
        ConfigError: No kind has this name.
    """
    if name not in KINDS:
        for kind in model_kinds().values():
            if name in kind.former_names:
                return kind
    return KINDS.load_instance(name, ModelKind)
