"""The configuration of layers that differ one by one.

Importing this module does not import torch.
"""

import dataclasses
import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from megatron_models.components.attention.config import AttentionConfig
from megatron_models.components.fields import ComponentConfig, flag, literal
from megatron_models.components.heterogeneous.blocks import (
    DENSE_FIELDS,
    EXPERT_FIELDS,
    UNCHANGED,
    Block,
    Part,
    read_blocks,
)
from megatron_models.components.linear.spec import LinearSpec
from megatron_models.components.mixer import Mixer
from megatron_models.components.moe.config import MoEConfig
from megatron_models.components.stream import StreamConfig
from megatron_models.errors import ConfigError
from megatron_models.lookup import import_object

_LONGEST_MODULE = 200

SublayerName = Literal["attention", "mlp"]


@dataclass(frozen=True, kw_only=True)
class HeterogeneousConfig(MoEConfig, AttentionConfig):
    """Settings of single layers, and mixers of other distributions.

    A setting of a layer has precedence over that of the model, such as ``moe_layer_freq``.
    """

    heterogeneous_layers_config_encoded_json: str = field(
        default="",
        metadata=flag(
            "--heterogeneous-layers-config-encoded-json",
            "JSON with the differences of each layer from the model: other heads, widths or kinds, "
            "no sublayer, or a linear layer in its place, in the format of Nemotron-NAS; empty: "
            "none",
        ),
    )
    layer_modules: str = field(
        default="",
        metadata=flag(
            "--layer-modules",
            "descriptions of mixers that replace those of all layers, such as "
            "attention=package.module:Class or mlp=package.module:Class, joined by commas; empty: "
            "none (our name)",
        ),
    )

    def _check(self) -> None:
        super()._check()
        if self.blocks and len(self.blocks) != self.num_layers:
            raise ConfigError(
                f"{{heterogeneous_layers_config_encoded_json:name}} has {len(self.blocks)} layers, "
                "but {num_layers:name} is {num_layers:repr}; give one block for each layer",
                vars(self),
            )
        if self.num_experts and not any(self.moe_layers):
            raise ConfigError(
                "{num_experts} has no effect, since no layer has experts; set {num_experts:name} "
                "0 or give a layer the kind moe",
                vars(self),
            )
        for number, block in enumerate(self.blocks):
            if block.mlp.experts and not self.num_experts:
                raise ConfigError(
                    f"layer {number}, mlp: the kind moe needs {{num_experts:name}} of at least 1, "
                    "not 0; set it or use the kind dense",
                    vars(self),
                )

    def fields_for_layers(self, layers: Sequence[int]) -> dict[str, Any]:
        """Returns the fields that differ in a model with only some of the layers."""
        changes = super().fields_for_layers(layers)
        if text := self.heterogeneous_layers_config_encoded_json:
            found = json.loads(text)
            blocks = found["block_configs"] if isinstance(found, dict) else found
            kept = json.dumps([blocks[layer] for layer in layers])
            changes["heterogeneous_layers_config_encoded_json"] = kept
        return changes

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The differences of each layer from the model; empty without any."""
        text = self.heterogeneous_layers_config_encoded_json
        if not text:
            return ()
        try:
            return read_blocks(text, self.hidden_size, self.num_attention_heads)
        except ConfigError as error:
            raise ConfigError(
                f"{{heterogeneous_layers_config_encoded_json:name}}: {literal(error)}", vars(self)
            ) from None

    @cached_property
    def replaced_modules(self) -> Mapping[str, str]:
        """The descriptions of ``layer_modules`` by sublayer.

        Raises:
            ConfigError: The text is invalid.
        """
        found: dict[str, str] = {}
        for entry in filter(None, self.layer_modules.split(",")):
            name, equals, module = (word.strip() for word in entry.partition("="))
            if name not in ("attention", "mlp") or not equals or not module or name in found:
                raise ConfigError(
                    "{layer_modules:name} is {layer_modules:repr}, not attention="
                    "package.module:Class, mlp=package.module:Class, or both joined by a comma",
                    vars(self),
                )
            found[name] = module
        return found

    def part(self, number: int, name: SublayerName) -> Part:
        """Returns the difference of one sublayer of a layer from the model's."""
        own: Part = getattr(self.blocks[number], name) if self.blocks else UNCHANGED
        usual = not (own.no_op or own.replace_with_linear or own.module)
        if usual and name in self.replaced_modules:
            if own != UNCHANGED:
                raise ConfigError(
                    f"layer {number}, {name}: its settings have no effect with "
                    "{layer_modules}; give the layer a module",
                    vars(self),
                )
            return Part(module=self.replaced_modules[name])
        return own

    @cached_property
    def moe_layers(self) -> tuple[bool, ...]:
        """For each layer, whether experts replace its feed-forward layer."""
        if not self.num_experts:
            return (False,) * self.num_layers
        parts = (self.part(number, "mlp") for number in range(self.num_layers))
        return tuple(
            not (part.no_op or part.replace_with_linear or part.module)
            and (usual if part.experts is None else part.experts)
            for part, usual in zip(parts, super().moe_layers, strict=True)
        )

    def own_mixer(
        self, number: int, name: SublayerName, usual: type[ComponentConfig], changes: dict[str, Any]
    ) -> Mixer | None:
        """Returns the mixer of a sublayer of a layer, or None if the layer does not have it.

        Args:
            number: Number of the layer.
            name: Name of the sublayer.
            usual: Description of the sublayer in a model whose layers are alike.
            changes: Fields of `usual` that differ from the model, such as a window.

        Raises:
            ConfigError: A setting does not fit the mixer; the message names the layer.
        """
        part = self.part(number, name)
        if part.no_op:
            return None
        try:
            kind = usual
            if part.replace_with_linear:
                kind = LinearSpec
            elif part.module:
                kind = _mixer_kind(part.module)
            if kind is not usual:
                names = {each.name for each in dataclasses.fields(kind)}
                changes = {key: value for key, value in changes.items() if key in names}
            _check_changes(kind, part)
            found = self.component(kind, **changes | dict(part.changes))
        except ConfigError as error:
            if part == UNCHANGED:
                raise
            raise error.prefixed(f"layer {number}, {name}: ") from None
        if not isinstance(found, Mixer):
            raise TypeError(f"{kind.__name__} is not the description of a mixer")
        return found


def _mixer_kind(module: str) -> type[ComponentConfig]:
    """Returns the class of a mixer's description.

    Raises:
        ConfigError: It cannot be imported, or is no such class.
    """
    if len(module) > _LONGEST_MODULE:
        raise ConfigError(
            f"{reprlib.repr(module)} is no name of a module; give package.module:Class"
        )
    kind = import_object(module, "the module")
    if not (
        isinstance(kind, type) and issubclass(kind, Mixer) and issubclass(kind, ComponentConfig)
    ):
        raise ConfigError(
            f"{module} is {reprlib.repr(kind)}, not a class that derives from Mixer and "
            "ComponentConfig; name the description, not the module that is built from it"
        )
    return kind


def _check_changes(kind: type[ComponentConfig], part: Part) -> None:
    """Refuses values that a mixer has no field for, or that its layer does not read."""
    stream = {each.name for each in dataclasses.fields(StreamConfig)}
    own = {each.name for each in dataclasses.fields(kind)} - stream
    if not part.module and "num_experts" in own:
        own -= set(DENSE_FIELDS)
    for key in part.changes:
        if key in own:
            continue
        if key in (*DENSE_FIELDS, *EXPERT_FIELDS) and not part.module:
            needed = "dense" if key in DENSE_FIELDS else "moe"
            raise ConfigError(f"{key} needs a layer of kind {needed}; leave it out")
        raise ConfigError(
            f"{kind.__name__} has no field {key!r} that a layer may change; use one of "
            f"{', '.join(sorted(own)) or 'none'}"
        )
