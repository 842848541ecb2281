"""One transformer layer with any sublayers."""

from functools import partial
from itertools import chain

from jaxtyping import Float
from torch import Tensor, nn

from megatron_models.components.context import Context
from megatron_models.components.layer import Layer, Sublayer, norm_groups, parallel_groups
from megatron_models.components.mixer import Mixer
from megatron_models.components.norm.module import Norm
from megatron_models.lookup import import_object
from megatron_models.placement import Placement


class Block(nn.Module):
    """The sublayers of a layer, whose outputs are added to the residual stream.

    Sublayers follow one another, or read the same stream if they are parallel.

    Args:
        layer: The sublayers.
        number: Global layer number, for caches and dropout.
        placement: Mesh, dtype, device and options.
    """

    def __init__(self, layer: Layer, number: int, placement: Placement) -> None:
        super().__init__()
        self.layer = number
        self.groups = [norm_groups(group) for group in parallel_groups(layer)]
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
        for group in self.groups:
            outputs = [self._outputs(readers, x, context) for readers in group]
            x = x + sum(outputs[1:], start=outputs[0])
            for sublayer in chain.from_iterable(group):
                if sublayer.norm_sum is not None:
                    x = getattr(self, f"{sublayer.name}_norm_sum")(x)
        context.observe_output(self.layer, x)
        return x

    def _outputs(self, readers: Layer, x: Tensor, context: Context) -> Tensor:
        """Returns the sum of the outputs of sublayers with the same norm of their input."""
        read = partial(self._sum, readers, context)
        if readers[0].norm is None:
            return read(x)
        return context.apply_norm(getattr(self, f"{readers[0].name}_norm"), x, read)

    def _sum(self, readers: Layer, context: Context, y: Tensor) -> Tensor:
        """Returns the sum of the outputs of sublayers that read the same normed input."""
        first, *others = (self._output(sublayer, context, y) for sublayer in readers)
        return sum(others, start=first)

    def _output(self, sublayer: Sublayer, context: Context, y: Tensor) -> Tensor:
        """Returns what one sublayer adds to the residual stream."""
        mixer = getattr(self, sublayer.name)
        y = self._read(mixer, sublayer.mixer.recompute_name, context, y)
        if sublayer.norm_after is not None:
            y = getattr(self, f"{sublayer.name}_norm_after")(y)
        y = context.hidden_dropout(y, self.layer, sublayer.site)
        return y if sublayer.multiplier == 1.0 else y * sublayer.multiplier

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
