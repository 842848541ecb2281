"""Norms that write the input of the linear layer after them in few bits, by Transformer Engine.

Its module `LayerNormLinear` computes a norm and a column-parallel layer so. Here both stay modules
of their own, and the norm takes the quantizer of the layer: its output is a quantized tensor, which
only the layer reads, and gathers with sequence parallelism.
"""

import torch
from jaxtyping import Float
from megatron_kernels import KernelError
from megatron_kernels.transformer_engine import NAME, te_quantized_norm, te_unsupported_reason
from megatron_parallel import RecomputeConfig
from megatron_parallel.tensor_parallel import ColumnParallelLinear
from torch import Tensor, nn

from megatron_models.components.norm.module import Norm
from megatron_models.transformer_engine.product import QuantizedProduct


class QuantizedNorm:
    """A norm and the column-parallel layer that reads its output.

    Args:
        norm: The norm.
        layer: The layer.
        product: Its product.
    """

    def __init__(self, norm: Norm, layer: ColumnParallelLinear, product: QuantizedProduct) -> None:
        self._norm, self._layer, self._product = norm, layer, product

    def writes(self, recompute: RecomputeConfig, reader: str | None) -> bool:
        """Returns whether the norm writes few bits in a pass.

        It does not if the pass recomputes the norm or its reader, moves activations to the host, or
        gathers the input in slices, which all take the tensor apart.

        Args:
            recompute: What the pass recomputes.
            reader: Name of the sublayer that reads, as in `RecomputeConfig.modules`.
        """
        if recompute.selects("layernorm") or (reader is not None and recompute.selects(reader)):
            return False
        return recompute.cpu_offloading_num_layers == 0 and self._layer.num_slices == 1

    def __call__(
        self, x: Float[Tensor, "s b h"], sequence_parallel: bool | None
    ) -> Float[Tensor, "s b h"]:
        """Returns the norm of a tensor in few bits.

        Args:
            x: Input of the norm.
            sequence_parallel: Whether it is a part of the sequence. Defaults to the setting of the
                layer.

        Raises:
            KernelError: Transformer Engine is missing or does not support the tensors.
        """
        norm, layer, product = self._norm, self._layer, self._product
        cut = layer.sequence_parallel if sequence_parallel is None else sequence_parallel
        group = layer.axis.group if cut else None
        others = (norm.weight,) if norm.bias is None else (norm.weight, norm.bias)
        reason = te_unsupported_reason(x, *others)
        if reason is not None:
            raise KernelError(f"a norm cannot use backend {NAME}: {reason}")
        quantizer = product.quantizer("input", x.device, rows=True, group=group)
        own = norm.weight, norm.bias, norm.epsilon, norm.zero_centered
        y = te_quantized_norm(x, *own, quantizer)
        if torch.is_grad_enabled() and layer.weight.requires_grad:
            product.observe_norm(quantizer)
        return y


def quantized_norm(norm: Norm, mixer: nn.Module) -> QuantizedNorm | None:
    """Returns a norm that writes few bits, or None if its reader or backend does not take part.

    Args:
        norm: A norm whose output only ``mixer`` reads.
        mixer: The reader. Its attribute ``input_layer`` is the column-parallel layer that alone
            reads its input, if it has such a one.
    """
    layer = getattr(mixer, "input_layer", None)
    if norm.backend != NAME or not isinstance(layer, ColumnParallelLinear):
        return None
    product = layer.product
    if not isinstance(product, QuantizedProduct) or not product.reads_quantized_norms:
        return None
    return QuantizedNorm(norm, layer, product)
