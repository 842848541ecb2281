"""The parameters of a rank as an optimizer needs them: sharding, gradients and local shards.

`TrainableParameters` describes the parameters of a plain module; its gradients are where autograd
leaves them. `TrainableChunks` holds the model chunks of a pipeline rank; its gradients are in
buffers. An optimizer takes either.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor
from torch.nn import Parameter

from megatron_parallel.data_parallel.shards import ParameterShards
from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.mesh import Mesh
from megatron_parallel.sharding.sharding import Sharding


@runtime_checkable
class Trainable(Protocol):
    """Parameters of one rank, with their gradients."""

    @property
    def mesh(self) -> Mesh:
        """The mesh of this rank."""

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """This rank's parameters by global name, each of them once (a tied weight has one name)."""

    @property
    def table(self) -> Mapping[str, Sharding]:
        """Sharding of each parameter."""

    @property
    def shards(self) -> Sequence[ParameterShards]:
        """The parameter shards that this rank updates; empty if it updates whole parameters."""

    def gradients(self) -> Mapping[str, Float[Tensor, "..."] | None]:
        """Returns gradients summed over the data axis, of `shards` if there are any.

        None stands for a gradient of zero.
        """

    def shard_gradients(self) -> Mapping[str, Float[Tensor, "..."]] | None:
        """Returns one shard of the gradients, of which every data-parallel rank has another.

        It is the shard that the rank has with `shards`. A norm that is computed from these shards
        is the same with and without `shards`, to the last bit. None if the ranks cannot divide
        their gradients.
        """

    def zero(self) -> None:
        """Drops all gradients and starts the next step."""


class TrainableParameters:
    """Parameters given by name.

    Args:
        parameters: This rank's parameters by global name, such as `module.named_parameters()`.
        table: Sharding of each parameter, such as `collect_shardings(module)`.
        mesh: The mesh of this rank.
        gradients: Returns the gradients, such as `GradientBuffers.gradients`. Defaults to those
            that autograd leaves on the parameters; on several data-parallel ranks the caller sums
            them.
        shards: The parameter shards that this rank updates, one for each set of buffers. Defaults
            to none: the rank updates whole parameters.

    Attributes:
        parameters: By global name.
        table: Sharding of each parameter.
        mesh: The mesh of this rank.
        shards: The parameter shards that this rank updates.

    Raises:
        LayoutError: There are shards, but no gradients of shards.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter] | Iterable[tuple[str, Parameter]],
        table: Mapping[str, Sharding],
        mesh: Mesh,
        *,
        gradients: Callable[[], Mapping[str, Tensor]] | None = None,
        shards: Sequence[ParameterShards] = (),
    ) -> None:
        if shards and gradients is None:
            raise LayoutError(
                "shards of parameters need shards of gradients: pass the gradients of the buffers "
                "that the shards were built with"
            )
        self.parameters = dict(parameters)
        self.table = table
        self.mesh = mesh
        self.shards = tuple(shards)
        self._source = gradients

    def gradients(self) -> Mapping[str, Float[Tensor, "..."] | None]:
        """Returns the gradients by global name."""
        if self._source is not None:
            return self._source()
        return {name: parameter.grad for name, parameter in self.parameters.items()}

    def shard_gradients(self) -> None:
        """Returns None: the function `gradients` does not say how ranks would divide them."""
        return

    def zero(self) -> None:
        """Drops the gradients on the parameters; the owner of `gradients` drops its own."""
        if self._source is None:
            for parameter in self.parameters.values():
                parameter.grad = None
