"""One transformer layer with any sublayers."""

from functools import partial
from itertools import chain

import torch
from jaxtyping import Float
from megatron_kernels import bias_dropout_add
from torch import Tensor, nn

from megatron_models.components.context import Context
from megatron_models.components.dropout import DropsByLayer
from megatron_models.components.layer import Layer, Sublayer, norm_groups, parallel_groups
from megatron_models.components.mixer import Mixer
from megatron_models.components.norm.module import Norm, addition_of
from megatron_models.lookup import import_object
from megatron_models.placement import Placement
from megatron_models.transformer_engine.norm import QuantizedNorm, quantized_norm


class Block(nn.Module):
    """The sublayers of a layer, whose outputs are added to the residual stream.

    Sublayers follow one another, or read the same stream if they are parallel. If the placement
    fuses `megatron_kernels.add_rms_norm` or `add_layer_norm`, an addition to the stream and the
    norm of the sum that follows it are one operation. The addition at the end of a layer is then
    left to the first norm of the next one.

    Args:
        layer: The sublayers.
        number: Global layer number, for caches and dropout.
        placement: Mesh, dtype, device and options.

    Attributes:
        adds_with_norm: Backend of the operation that adds and computes a norm, or None.
        drops_and_adds: Backend of the operation that drops elements and adds, or None.
        dropout_layer: Number of the layer, which masks of dropout depend on.
        alone: Names of sublayers that are not parallel to others.
        quantized_norms: Norms that write the input of a sublayer in few bits, by its name.
    """

    def __init__(self, layer: Layer, number: int, placement: Placement) -> None:
        super().__init__()
        self.layer, placement = number, placement.of_layer(number)
        self.dropout_layer: int | Tensor = number
        self.groups = [norm_groups(group) for group in parallel_groups(layer)]
        additions = {addition_of(each.norm) for each in layer if each.norm is not None}
        backends = [backend for op in additions if (backend := placement.fused(op)) is not None]
        self.adds_with_norm = next(iter(backends), None)
        self.drops_and_adds = placement.fused(bias_dropout_add)
        groups = [[*chain.from_iterable(group)] for group in self.groups]
        self.alone = {group[0].name for group in groups if len(group) == 1}
        for sublayer in layer:
            norms = {name: Norm(norm, placement) for name, norm in sublayer.norms.items()}
            first = f"{sublayer.name}_norm"
            if first in norms:
                self.add_module(first, norms.pop(first))
            self.add_module(sublayer.name, build_mixer(sublayer.mixer, number, placement))
            for name, norm in norms.items():
                self.add_module(name, norm)
        self.quantized_norms = self._quantized_norms()

    def forward(
        self,
        x: Float[Tensor, "s b h"],
        context: Context,
        added: Float[Tensor, "s b h"] | None = None,
        *,
        defers: bool = False,
    ) -> "Tensor | Addition":
        """Returns the residual stream after the layer.

        Args:
            x: Residual stream before the layer.
            context: State of the pass.
            added: What is to be added to it first, or None.
            defers: Whether to return the last addition as its two terms, for the next layer.
        """
        addition = self._run(x, added, context)
        return addition if defers else add(addition)

    def share_code(self, device: torch.device) -> None:
        """Makes the number of the layer a tensor, so that compiled code is the same for all layers.

        Call it before the forward pass is compiled.
        """
        number = torch.tensor(self.layer, device=device)
        for module in self.modules():
            if isinstance(module, DropsByLayer):
                module.dropout_layer = number

    def _run(self, x: Tensor, added: Tensor | None, context: Context) -> "Addition":
        for group in self.groups:
            outputs = []
            for readers in group:
                output, x = self._outputs(readers, x, added, context)
                outputs.append(output)
                added = None
            first, output = group[0][0], sum(outputs[1:], start=outputs[0])
            if self.drops_and_adds is not None and self._drops_at_once(first, context):
                site = self.layer, first.site
                x = context.add_with_dropout(x, output, *site, backend=self.drops_and_adds)
            else:
                added = output
            for sublayer in chain.from_iterable(group):
                if sublayer.norm_sum is not None:
                    x, added = getattr(self, f"{sublayer.name}_norm_sum")(add((x, added))), None
            if self.adds_with_norm is None:
                x, added = add((x, added)), None
        if context.observes_outputs:
            x, added = add((x, added)), None
            context.observe_output(self.layer, x)
        return x, added

    def _quantized_norms(self) -> dict[str, QuantizedNorm]:
        """Returns the norms that can write the input of the only sublayer that reads them."""
        found = {}
        for readers in chain.from_iterable(self.groups):
            first = readers[0]
            if len(readers) > 1 or first.norm is None or self.adds_with_norm is not None:
                continue
            mixer = getattr(self, first.name)
            few = quantized_norm(getattr(self, f"{first.name}_norm"), mixer)
            if few is not None:
                found[first.name] = few
        return found

    def _drops_at_once(self, sublayer: Sublayer, context: Context) -> bool:
        """Returns whether one operation drops elements of an output and adds it to the stream."""
        chosen = self.drops_and_adds is not None and sublayer.name in self.alone
        return chosen and context.drops_hidden and sublayer.multiplier == 1.0

    def _outputs(
        self, readers: Layer, x: Tensor, added: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor]:
        """Returns the sum of the outputs of sublayers with the same norm, and the stream they read.

        That is ``x``, after adding what is ``added``.
        """
        read = partial(self._sum, readers, context)
        if readers[0].norm is None:
            x = add((x, added))
            return read(x), x
        norm: Norm = getattr(self, f"{readers[0].name}_norm")
        if self.adds_with_norm is None:
            x = add((x, added))
            few = self.quantized_norms.get(readers[0].name)
            if few and few.writes(context.recompute, readers[0].mixer.recompute_name):
                return read(few(x, context.sequence_parallel)), x
            return context.apply_norm(norm, x, read), x
        x, y = norm.after_addition(x, added, self.adds_with_norm)
        return context.read_norm(norm, x, y, read), x

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
        if not self._drops_at_once(sublayer, context):
            y = context.hidden_dropout(y, self.dropout_layer, sublayer.site)
        return y if sublayer.multiplier == 1.0 else y * sublayer.multiplier

    @staticmethod
    def _read(mixer: nn.Module, name: str | None, context: Context, y: Tensor) -> Tensor:
        if name is None:
            result: Tensor = mixer(y, context)
            return result
        return context.maybe_recompute(name, partial(mixer, context=context), y)


Addition = tuple[Tensor, Tensor | None]
"""The residual stream, and what is to be added to it, if anything."""


def add(addition: Addition) -> Tensor:
    """Returns the sum."""
    x, added = addition
    return x if added is None else x + added


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
