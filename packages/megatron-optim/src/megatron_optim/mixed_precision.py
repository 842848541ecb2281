"""Full-precision copies of low-precision parameters.

A bf16 number has 8 bits of mantissa: an update smaller than 1/256 of a weight is lost when it is
added to it. The optimizer therefore updates an fp32 main parameter and rounds the result into the
bf16 parameter that the model computes with. Parameters in fp32 and float64 are their own main
parameters and cost nothing here.
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from megatron_parallel import Mesh, Sharding, View, parameter_views
from torch import Tensor

from megatron_optim.errors import OptimError

Gradients = Callable[[], Mapping[str, Tensor]]
"""Returns gradients by global parameter name, such as `GradientBuffers.gradients`."""

FULL_PRECISION = (torch.float32, torch.float64)


class MainParameters:
    """The tensors that an optimizer updates on behalf of a model's parameters.

    ``tensors`` maps every parameter's name to its main parameter, on the same device; ``copies``
    holds those names whose main parameter is an fp32 copy. Gradients are read from the parameters,
    or asked from ``source`` where it is given.
    """

    sharded = False
    """Whether data-parallel ranks update a shard each, and not all the same."""

    def __init__(self, parameters: Mapping[str, Tensor], source: Gradients | None = None) -> None:
        self._parameters = dict(parameters)
        self._source = source
        self.tensors: dict[str, Tensor] = {}
        self.copies: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            if parameter.dtype in FULL_PRECISION:
                self.tensors[name] = parameter
            elif parameter.dtype == torch.bfloat16:
                main = parameter.detach().to(torch.float32, copy=True)
                self.tensors[name] = self.copies[name] = main
            else:
                raise OptimError(
                    f"parameter {name!r} is {parameter.dtype}; "
                    "parameters must be float32, float64 or bfloat16"
                )

    def gradients(self) -> dict[str, Float[Tensor, "..."]]:
        """Return every gradient in the dtype of its main parameter.

        A parameter that the backward pass did not reach has a gradient of zero, so that its update
        does not depend on which rank or micro-batch reached it.
        """
        given = self._given()
        gradients = {}
        for name, main in self.tensors.items():
            gradient = given[name]
            gradients[name] = (
                torch.zeros_like(main) if gradient is None else gradient.to(main.dtype)
            )
        return gradients

    def _given(self) -> Mapping[str, Tensor | None]:
        if self._source is None:
            return {name: parameter.grad for name, parameter in self._parameters.items()}
        given = self._source()
        missing = sorted(self.tensors.keys() - given.keys())
        if missing:
            raise OptimError(
                f"the gradients handed in lack {len(missing)} of the parameters, the first is "
                f"{missing[0]!r}; make the buffers and the optimizer from the same parameters"
            )
        return given

    @torch.no_grad()
    def publish(self) -> None:
        """Round the fp32 copies into the model's parameters."""
        for name, main in self.copies.items():
            self._parameters[name].copy_(main)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the fp32 copies anew from the model's parameters, after weights were loaded."""
        for name, main in self.copies.items():
            main.copy_(self._parameters[name])

    def views(
        self, tensors: Mapping[str, Tensor], table: Mapping[str, Sharding], mesh: Mesh
    ) -> dict[str, list[View]]:
        """Return views of tensors shaped like the main parameters, for a checkpoint."""
        return parameter_views(tensors, table, mesh)

    def zero_grad(self) -> None:
        """Drop all gradients; those that were handed in are for their holder to drop."""
        if self._source is None:
            for parameter in self._parameters.values():
                parameter.grad = None
