"""One transformer layer with any sublayers."""

from functools import partial

from jaxtyping import Float
from torch import Tensor, nn

from megatron_models.components.context import Context
from megatron_models.components.layer import Layer
from megatron_models.components.mixer import Mixer
from megatron_models.components.norm.module import Norm
from megatron_models.lookup import import_object
from megatron_models.placement import Placement


class Block(nn.Module):
    """The sublayers of a layer in sequence, each added to the residual stream.

    With norms before the mixers the layer is pre-LN (Xiong et al., 2020).

    Args:
        layer: The sublayers.
        number: Global layer number, for caches and dropout.
        placement: Mesh, dtype, device and options.
    """

    def __init__(self, layer: Layer, number: int, placement: Placement) -> None:
        super().__init__()
        self.layer = number
        self.sublayers = layer
        for sublayer in layer:
            norms = {name: Norm(norm, placement) for name, norm in sublayer.norms.items()}
            first = f"{sublayer.name}_norm"
            if first in norms:
                self.add_module(first, norms.pop(first))
            self.add_module(sublayer.name, build_mixer(sublayer.mixer, number, placement))
            for name, norm in norms.items():
                self.add_module(name, norm)

    def forward(self, x: Float[Tensor, "s b h"], context: Context) -> Float[Tensor, "s b h"]:
        """Returns the residual stream after the layer."""
        for sublayer in self.sublayers:
            mixer = getattr(self, sublayer.name)
            read = partial(self._read, mixer, sublayer.mixer.recompute_name, context)
            if sublayer.norm is None:
                y = read(x)
            else:
                y = context.apply_norm(getattr(self, f"{sublayer.name}_norm"), x, read)
            if sublayer.norm_after is not None:
                y = getattr(self, f"{sublayer.name}_norm_after")(y)
            x = x + context.hidden_dropout(y, self.layer, sublayer.site)
            if sublayer.norm_sum is not None:
                x = getattr(self, f"{sublayer.name}_norm_sum")(x)
        return x

    @staticmethod
    def _read(mixer: nn.Module, name: str | None, context: Context, y: Tensor) -> Tensor:
        if name is None:
            result: Tensor = mixer(y, context)
            return result
        return context.maybe_recompute(name, partial(mixer, context=context), y)


def build_mixer(mixer: Mixer, number: int, placement: Placement) -> nn.Module:
    """Builds the module of a mixer, of any distribution.

    Args:
        mixer: The mixer's description.
        number: Number of its layer.
        placement: Mesh, dtype, device and options.

    Raises:
        ConfigError: The class that the description names cannot be imported.
    """
    build = import_object(mixer.module, f"{type(mixer).__name__}.module")
    module: nn.Module = build(mixer, number, placement)
    return module
