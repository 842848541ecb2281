"""Main gradients of a pipeline rank: buffers for each model chunk, driven by the schedule.

    gradients = ChunkGradients(mesh, chunks, table)
    engine = PipelineEngine(mesh, chunks, ..., around_backward=gradients.around_backward)
    engine.run(micro_batches, denominators)
    gradients.finish()
    optimizer.step(gradients.gradients())
    gradients.zero()

When the last backward pass of a stage begins, its buckets may be reduced as they fill. If that pass
is split, its weight half adds to `.grad` without calling hooks, and the buckets are reduced after
it. A parameter that two stages of this rank share (a tied embedding at both ends of a V) is in
buffers of its own, which are reduced after the last pass of both stages.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_parallel.data_parallel.buffers import GradientBuffers, finish_buffers
from megatron_parallel.data_parallel.config import DEFAULT_CONFIG, DataParallelConfig
from megatron_parallel.data_parallel.fully_sharded import FullySharded
from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.mesh import Mesh
from megatron_parallel.pipeline.contract import BackwardPass
from megatron_parallel.pipeline.shared import stage_parameters
from megatron_parallel.sharding.sharding import Sharding


class ChunkGradients:
    """`GradientBuffers` of all model chunks of a rank.

    Args:
        mesh: The mesh of this rank; without pipeline there is one stage.
        chunks: Its model chunks, in the order of `mesh.layout.stages`.
        table: Sharding of each parameter.
        config: Configuration of the buffers.

    Attributes:
        parameters: This rank's parameters by global name, each of them once.
        buffers: One set for each chunk, then one for the parameters that chunks share, if any.
        holders: For each set of buffers, the chunks that have parameters in it, and the buffers.

    Raises:
        LayoutError: Two different parameters have the same name, or a parameter has no row in the
            table.
    """

    def __init__(
        self,
        mesh: Mesh,
        chunks: Sequence[nn.Module],
        table: Mapping[str, Sharding],
        config: DataParallelConfig = DEFAULT_CONFIG,
    ) -> None:
        stages = mesh.layout.stages(mesh.axis("pp").index)
        if len(stages) != len(chunks):
            raise LayoutError(f"got {len(chunks)} chunks for {len(stages)} stages")
        self.parameters = stage_parameters(chunks)
        names = [{name for name, _ in chunk.named_parameters()} for chunk in chunks]
        self._shared = {n for n in self.parameters if sum(n in each for each in names) > 1}
        self._sharing = {s for s, each in zip(stages, names, strict=True) if each & self._shared}
        self._open = set(self._sharing)  # those that have a backward pass left in this step

        def of(wanted: set[str]) -> GradientBuffers:
            chosen: dict[str, Parameter] = {n: p for n, p in self.parameters.items() if n in wanted}
            return GradientBuffers(chosen, table, mesh, config)

        own = [of(each - self._shared) for each in names]
        self._of_stage = dict(zip(stages, own, strict=True))
        self._shared_buffers = of(self._shared) if self._shared else None
        self.buffers = [*own, *([self._shared_buffers] if self._shared_buffers else [])]
        sharing = [c for c, each in zip(chunks, names, strict=True) if each & self._shared]
        self.holders = list(zip([*([c] for c in chunks), sharing], self.buffers, strict=False))

    def around_backward(self, backward: BackwardPass) -> AbstractContextManager[None]:
        """Returns the context of a backward pass; pass this method to `PipelineEngine`."""
        return self._split(backward) if backward.split else self._whole(backward)

    @contextmanager
    def _whole(self, backward: BackwardPass) -> Iterator[None]:
        self._of_stage[backward.stage].begin(last=backward.last)
        yield
        self._update_shared(backward)

    @contextmanager
    def _split(self, backward: BackwardPass) -> Iterator[None]:
        buffers = self._of_stage[backward.stage]
        shared = self._shared_buffers if backward.stage in self._sharing else None
        with (
            buffers.weight_backward(),
            nullcontext() if shared is None else shared.weight_backward(),
        ):
            yield
        if backward.last:
            buffers.start_reductions()
        self._update_shared(backward)

    def _update_shared(self, backward: BackwardPass) -> None:
        if self._shared_buffers is None or backward.stage not in self._sharing:
            return
        if backward.last:
            self._open.discard(backward.stage)
        if self._open:
            self._shared_buffers.collect_gradients()
        else:
            self._shared_buffers.start_reductions()

    def finish(self) -> None:
        """Returns when all sums are complete."""
        finish_buffers(self.buffers)

    def gradients(self) -> dict[str, Float[Tensor, "..."]]:
        """Returns the summed main gradients by global name, in the order of `parameters`."""
        found = {name: g for buffers in self.buffers for name, g in buffers.gradients().items()}
        return {name: found[name] for name in self.parameters if name in found}

    def zero(self) -> None:
        """Drops all gradients and starts the next step."""
        self._open = set(self._sharing)
        for buffers in self.buffers:
            buffers.zero()

    def close(self) -> None:
        """Removes all hooks."""
        for buffers in self.buffers:
            buffers.close()


class FullyShardedChunks:
    """`FullySharded` for all model chunks of a rank, driven by the schedule like `ChunkGradients`.

    Args:
        mesh: The mesh of this rank.
        chunks: Its model chunks, in the order of `mesh.layout.stages`.
        units: For each chunk, the modules that are gathered one at a time.
        table: Sharding of each parameter.
        config: Configuration of the sharding.

    Attributes:
        parameters: This rank's parameters by global name.
        buffers: One `FullySharded` for each chunk.
        modules: The modules that a `PipelineEngine` runs.

    Raises:
        LayoutError: Two chunks of this rank share a parameter, which each would shard separately.
    """

    def __init__(
        self,
        mesh: Mesh,
        chunks: Sequence[nn.Module],
        units: Sequence[Sequence[nn.Module]],
        table: Mapping[str, Sharding],
        config: DataParallelConfig = DEFAULT_CONFIG,
    ) -> None:
        names = [name for chunk in chunks for name, _ in chunk.named_parameters()]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise LayoutError(
                f"{min(twice)!r} belongs to two stages of one rank, and fully sharded training "
                'would shard it twice: untie it, or use ParallelLayout(stage_mapping="loop")'
            )
        self.buffers = [
            FullySharded(chunk, parts, table, mesh, config)
            for chunk, parts in zip(chunks, units, strict=True)
        ]
        self.modules: list[nn.Module] = [sharded.module for sharded in self.buffers]
        self.parameters = stage_parameters(chunks)
        stages = mesh.layout.stages(mesh.axis("pp").index)
        self._of_stage = dict(zip(stages, self.buffers, strict=True))

    def around_backward(self, backward: BackwardPass) -> AbstractContextManager[None]:
        """Returns the context of a backward pass.

        Raises `LayoutError` for a split pass: torch's hooks need whole passes.
        """
        if backward.split:
            raise LayoutError(
                "fully sharded training needs whole backward passes: choose a schedule that does "
                "not split them, such as 1f1b"
            )
        self._of_stage[backward.stage].begin(last=backward.last)
        return nullcontext()

    def finish(self) -> None:
        """Sums what remains to be summed; parameters that stages share in the order of names."""
        for sharded in self.buffers:
            sharded.sum_partial()
        tied = {name: sharded for sharded in self.buffers for name in sharded.tied}
        for name in sorted(tied):
            tied[name].sum_over_stages(name)

    def gradients(self) -> dict[str, Float[Tensor, "..."]]:
        """Returns this rank's boxes of the summed gradients by global name."""
        return {name: g for sharded in self.buffers for name, g in sharded.gradients().items()}

    def zero(self) -> None:
        """Drops all gradients and starts the next step."""
        for sharded in self.buffers:
            sharded.zero()
