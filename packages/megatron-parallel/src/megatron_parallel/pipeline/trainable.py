"""The stages of one rank as they are trained: what a training loop and an optimizer share.

    stages = TrainableChunks(model_stages, mesh, DataParallelConfig(use_distributed_optimizer=True))
    engine = PipelineEngine(mesh, stages.modules, ..., around_backward=stages.around_backward)
    optimizer = megatron_optim.Optimizer(stages, config)
    engine.run(micro_batches, denominators)
    stages.finish()
    optimizer.step(lr)
    stages.update_states()
    stages.zero()

Every layout and way of summing gradients is used alike; `DataParallelConfig` chooses.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_parallel.data_parallel.buffers import GradientBuffers
from megatron_parallel.data_parallel.config import DEFAULT_CONFIG, DataParallelConfig
from megatron_parallel.data_parallel.finite import describe_nonfinite_gradients
from megatron_parallel.data_parallel.parameters import ParameterBuffers
from megatron_parallel.data_parallel.shards import ParameterShards
from megatron_parallel.mesh import Mesh
from megatron_parallel.pipeline.contract import BackwardPass
from megatron_parallel.pipeline.gradients import ChunkGradients, FullyShardedChunks
from megatron_parallel.sharding import Sharding
from megatron_parallel.state import collect_states
from megatron_parallel.views import View, collect_shardings, parameter_views


class TrainableChunks:
    """Parameters, sharding table, main gradients and shards of a rank's stages; a `Trainable`.

    Args:
        stages: This rank's stages, in the order of `mesh.layout.stages`; one without pipeline.
        mesh: Where this rank stands.
        config: How gradients are summed, and what each rank keeps.
        units: Returns the modules of a stage that are gathered one at a time; asked for with
            `config.use_torch_fsdp2`. Defaults to none.

    Attributes:
        mesh: Where this rank stands.
        config: How gradients are summed.
        modules: What runs the stages.
        parameters: This rank's parameters by global name, each of them once. Call
            `wait_for_parameters` before reading them outside of the stages.
        table: How each is cut, states too.
        states: State of these stages that is not a parameter, by global name.
        buffers: Main gradients, one set for each stage, and one for what stages share; empty with
            `config.use_torch_fsdp2`, which has none.
        shards: What this rank updates of each set, if it does not update all.

    Raises:
        LayoutError: The stages do not fit the mesh, a parameter is not described, or cannot be cut.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        mesh: Mesh,
        config: DataParallelConfig = DEFAULT_CONFIG,
        units: Callable[[nn.Module], Sequence[nn.Module]] | None = None,
    ) -> None:
        self.mesh = mesh
        self.config = config
        self.table: dict[str, Sharding] = {}
        for stage in stages:
            self.table.update(collect_shardings(stage))
        self.states = collect_states(stages)
        self.modules: list[nn.Module] = list(stages)
        self.shards: list[ParameterShards] = []
        self.buffers: list[GradientBuffers] = []
        self._gradients: ChunkGradients | FullyShardedChunks
        if config.use_torch_fsdp2:
            gathered = [() if units is None else units(stage) for stage in stages]
            self._gradients = cut = FullyShardedChunks(mesh, stages, gathered, self.table, config)
            self.modules = cut.modules
            self.shards.extend(cut.buffers)
        else:
            self._gradients = whole = ChunkGradients(mesh, stages, self.table, config)
            self.buffers = whole.buffers
            if config.use_distributed_optimizer:
                self.shards.extend(
                    ParameterBuffers(holders, buffers, self.table)
                    for holders, buffers in whole.holders
                )
        self.parameters: Mapping[str, Parameter] = self._gradients.parameters

    def around_backward(self, backward: BackwardPass) -> AbstractContextManager[None]:
        """Returns the `around_backward` of a `PipelineEngine`."""
        return self._gradients.around_backward(backward)

    def finish(self) -> None:
        """Waits until all gradients are summed."""
        self._gradients.finish()

    def gradients(self) -> dict[str, Float[Tensor, "..."]]:
        """Returns the main gradients by global name, after `finish`."""
        return self._gradients.gradients()

    def describe_nonfinite_gradients(self) -> str:
        """Return which gradient is not finite, in the same line on every rank; empty if none is."""
        found = [item for each in self._gradients.buffers for item in each.nonfinite_gradients()]
        return describe_nonfinite_gradients(found, self.mesh)

    def zero(self) -> None:
        """Drops all gradients and observations, and starts the next step."""
        self._gradients.zero()
        for state in self.states.values():
            state.reset()

    def update_states(self) -> None:
        """Updates state that is not a parameter by what this step has observed on all ranks."""
        for state in self.states.values():
            state.step()

    def wait_for_parameters(self) -> None:
        """Returns when all weights of the latest step are on this rank."""
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
