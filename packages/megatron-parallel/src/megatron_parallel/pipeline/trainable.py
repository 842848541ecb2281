"""Model chunks of one rank with their gradients, for a training loop and its optimizer.

    trainable = TrainableChunks(chunks, mesh, DataParallelConfig(use_distributed_optimizer=True))
    engine = PipelineEngine(
        mesh, trainable.modules, ..., around_backward=trainable.around_backward
    )
    optimizer = megatron_optim.Optimizer(trainable, config)
    with trainable.constant_weights():
        engine.run(micro_batches, denominators)
    trainable.finish()
    optimizer.step(lr)
    trainable.update_states()
    trainable.zero()

The same calls serve every layout and `DataParallelConfig`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain

from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_parallel.data_parallel.buffers import GradientBuffers
from megatron_parallel.data_parallel.config import DEFAULT_CONFIG, DataParallelConfig
from megatron_parallel.data_parallel.finite import describe_nonfinite_gradients
from megatron_parallel.data_parallel.parameters import ParameterBuffers
from megatron_parallel.data_parallel.shards import ParameterShards
from megatron_parallel.mesh.mesh import Mesh
from megatron_parallel.pipeline.contract import BackwardPass
from megatron_parallel.pipeline.gradients import ChunkGradients, FullyShardedChunks
from megatron_parallel.sharding.sharding import Sharding
from megatron_parallel.sharding.step_state import collect_states, step_states
from megatron_parallel.sharding.views import View, collect_shardings, parameter_views
from megatron_parallel.tensor_parallel.saving import ConstantWeights


class TrainableChunks:
    """Model chunks of a rank, with sharding table, main gradients and shards; a `Trainable`.

    Args:
        chunks: This rank's model chunks, in the order of `mesh.layout.stages`; one without
            pipeline.
        mesh: The mesh of this rank.
        config: How gradients are summed, and what each rank holds.
        units: Returns the modules of a chunk that are gathered one at a time, with
            `config.use_torch_fsdp2` or `waits_by_unit`. Defaults to none.
        waits_by_unit: Whether with `config.overlap_param_gather` a unit waits for all its
            parameters before its forward pass. By default each module in it waits for its own,
            which compiled code cannot do.

    Attributes:
        mesh: The mesh of this rank.
        config: How gradients are summed.
        modules: The modules that a `PipelineEngine` runs.
        parameters: This rank's parameters by global name, each of them once. Call
            `wait_for_parameters` before reading them outside of the chunks.
        table: Sharding of each parameter and state.
        states: State of these chunks that is not a parameter, by global name.
        buffers: Main gradients: one set for each chunk, and one for parameters that chunks share.
            Empty with `config.use_torch_fsdp2`.
        shards: The parameter shards that this rank updates; empty if it updates whole parameters.

    Raises:
        LayoutError: The chunks do not fit the mesh, or a parameter is not in the table or cannot be
            sharded.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mesh: Mesh,
        config: DataParallelConfig = DEFAULT_CONFIG,
        units: Callable[[nn.Module], Sequence[nn.Module]] | None = None,
        *,
        waits_by_unit: bool = False,
    ) -> None:
        self.mesh = mesh
        self.config = config
        self.table: dict[str, Sharding] = {}
        for chunk in chunks:
            self.table.update(collect_shardings(chunk))
        self.states = collect_states(chunks)
        self.modules: list[nn.Module] = list(chunks)
        self.shards: list[ParameterShards] = []
        self.buffers: list[GradientBuffers] = []
        self._gradients: ChunkGradients | FullyShardedChunks
        if config.use_torch_fsdp2:
            units_of_chunk = [() if units is None else units(chunk) for chunk in chunks]
            self._gradients = sharded = FullyShardedChunks(
                mesh, chunks, units_of_chunk, self.table, config
            )
            self.modules = sharded.modules
            self.shards.extend(sharded.buffers)
        else:
            self._gradients = buffered = ChunkGradients(mesh, chunks, self.table, config)
            self.buffers = buffered.buffers
            if config.use_distributed_optimizer:
                waiting = []
                if units is not None and waits_by_unit:
                    waiting = [*chain.from_iterable(map(units, chunks))]
                self.shards.extend(
                    ParameterBuffers(holders, buffers, self.table, waiting)
                    for holders, buffers in buffered.holders
                )
        self.parameters: Mapping[str, Parameter] = self._gradients.parameters
        # Whole weights that `fully_shard` drops after each pass would be held by what is converted.
        self._constant = ConstantWeights([] if config.use_torch_fsdp2 else chunks)

    def around_backward(self, backward: BackwardPass) -> AbstractContextManager[None]:
        """Returns the context of a backward pass; pass this method to `PipelineEngine`."""
        return self._gradients.around_backward(backward)

    def constant_weights(self, *, compiled: bool = False) -> AbstractContextManager[None]:
        """Returns a context in which no weight changes: that of the passes of one step.

        Products that convert weights, such as those in few bits, then do so once. Gathers of
        updated weights may be in flight. With `config.use_torch_fsdp2` every pass converts the
        weights that it gathers.

        Args:
            compiled: Whether the passes are compiled. Weights are then converted when the context
                begins, as compiled code needs it. If there are any, this waits for all gathers.
        """
        if compiled and self._constant.exist:
            self.wait_for_parameters()
        return self._constant.held(compiled=compiled)

    def finish(self) -> None:
        """Returns when all gradients are summed."""
        self._gradients.finish()

    def gradients(self) -> dict[str, Float[Tensor, "..."]]:
        """Returns the main gradients by global name, after `finish`."""
        return self._gradients.gradients()

    def shard_gradients(self) -> dict[str, Float[Tensor, "..."]] | None:
        """Returns this rank's shards of the gradients, after `finish`; None without buffers."""
        if not self.buffers:
            return None
        return {n: g for each in self.buffers for n, g in each.shard_gradients().items()}

    def describe_nonfinite_gradients(self) -> str:
        """Describes gradients that are not finite, in one line that is equal on all ranks.

        The line is empty if all gradients are finite.
        """
        found = [item for each in self._gradients.buffers for item in each.nonfinite_gradients()]
        return describe_nonfinite_gradients(found, self.mesh)

    def zero(self) -> None:
        """Drops all gradients and observations, and starts the next step."""
        self._gradients.zero()
        for state in self.states.values():
            state.reset()

    def update_states(self, unless: Bool[Tensor, ""] | None = None) -> None:
        """Updates state that is not a parameter from what all ranks observed in this step.

        Args:
            unless: A scalar on the device, equal on all ranks. If it is true, no state changes.
        """
        step_states(self.states, self.mesh, unless)

    def wait_for_parameters(self) -> None:
        """Returns when this rank has all updated weights of the latest step."""
        for shards in self.shards:
            shards.wait_for_parameters()

    def views(self) -> dict[str, list[View]]:
        """Returns views of all parameters and states, to save or to load into."""
        self.wait_for_parameters()
        states = {name: state.value for name, state in self.states.items()}
        if isinstance(self._gradients, FullyShardedChunks):
            cut = self._gradients.buffers
            found = {
                n: v for one in cut for n, v in one.views(one.all_local_shards(), self.mesh).items()
            }
        else:
            found = parameter_views(self.parameters, self.table, self.mesh)
        return {**found, **parameter_views(states, self.table, self.mesh)}
