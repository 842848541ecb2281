"""Defects for proofs, each of a kind that real training code has shipped."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import megatron_parallel.tensor_parallel.linear as linear
from megatron_parallel import GradientBuffers, Mesh, Sharding
from megatron_parallel.context_parallel import ContextSplit
from megatron_parallel.data_parallel.bucket import Bucket
from torch import Tensor

from megatron_train.config.run import RunConfig
from megatron_train.engine import StepEngine
from megatron_train.errors import TrainError
from megatron_train.prove.planting import Plant, Replace
from megatron_train.tasks.task import MicroBatch


@dataclass(frozen=True)
class Defect:
    """A mistake in one function.

    Attributes:
        name: Name for ``--defect``.
        summary: What is wrong.
        needs: What the layout must have.
        applies: Returns whether a run has it.
        plant: Plants the defect.
    """

    name: str
    summary: str
    needs: str
    applies: Callable[[RunConfig], bool]
    plant: Plant


class _Done(NamedTuple):
    """A message without communication."""

    result: Tensor

    def wait(self) -> Tensor:
        return self.result


def without_extra_axis(replace: Replace, axis: str) -> None:
    """Leaves out the sum of gradients over an axis of ranks that hold the same parameters."""
    true = Bucket.reduce_extra_axes

    def wrong(self: Bucket) -> None:
        self.extra_axes = tuple(other for other in self.extra_axes if other.name != axis)
        true(self)

    replace(Bucket, "reduce_extra_axes", wrong)


def norms_not_summed(mesh: Mesh, replace: Replace) -> None:
    """Leaves out the sum of the gradients of norms over tensor-parallel ranks."""
    without_extra_axis(replace, "tp")


def tied_not_summed(mesh: Mesh, replace: Replace) -> None:
    """Leaves out the sum of the gradients of the two copies of a tied embedding."""
    without_extra_axis(replace, "embedding")


def input_not_summed(mesh: Mesh, replace: Replace) -> None:
    """Leaves out the sum of an input's gradient over tensor-parallel ranks."""

    def own_part(whole: Tensor, axis: Any) -> _Done:
        return _Done(whole.chunk(axis.size)[axis.index].contiguous())

    replace(linear, "start_all_reduce", lambda x, axis: _Done(x))
    replace(linear, "start_reduce_scatter", own_part)


def mask_of_next_rank(mesh: Mesh, replace: Replace) -> None:
    """Gives each context-parallel rank the loss mask of the next."""
    true = ContextSplit.take

    def wrong(self: ContextSplit, t: Tensor, rank: int) -> Tensor:
        return true(self, t, (rank + 1) % self.ranks if t.is_floating_point() else rank)

    replace(ContextSplit, "take", wrong)


def bucket_left_out(mesh: Mesh, replace: Replace) -> None:
    """Leaves out the sum of a bucket of gradients over data-parallel ranks."""
    true = Bucket.launch

    def wrong(self: Bucket, own_largest: Tensor | None) -> None:
        if self.label.startswith("1 of"):
            self.launched = True
        else:
            true(self, own_largest)

    replace(Bucket, "launch", wrong)


def experts_divided(mesh: Mesh, replace: Replace) -> None:
    """Divides the gradient of experts by the number of ranks that hold them."""
    true = GradientBuffers.gradients

    def wrong(self: GradientBuffers) -> dict[str, Tensor]:
        ranks = mesh.axis("ep").size
        return {n: g / ranks if ".experts." in n else g for n, g in true(self).items()}

    replace(GradientBuffers, "gradients", wrong)


def experts_in_other_order(mesh: Mesh, replace: Replace) -> None:
    """Gives the ranks of experts each other's experts, in reverse order."""
    true = Sharding.expert_indices

    def wrong(self: Sharding, of: Any) -> range:
        own, count = true(self, of), self.shape[0]
        return range(count - own.stop, count - own.start)

    replace(Sharding, "expert_indices", wrong)


def micro_batch_not_counted(mesh: Mesh, replace: Replace) -> None:
    """Leaves the last micro-batch out of the number of tokens that losses are divided by."""
    true = StepEngine.denominators

    def wrong(self: StepEngine, batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
        return true(self, batches[:-1])

    replace(StepEngine, "denominators", wrong)


def mask_of_first_micro_batch(mesh: Mesh, replace: Replace) -> None:
    """Computes the losses of all micro-batches of a step with the mask of the first."""
    true_run, true_loss = StepEngine.run, StepEngine._loss
    first: list[MicroBatch] = []

    def run(self: StepEngine, *arguments: Any) -> Any:
        first.clear()
        return true_run(self, *arguments)

    def loss(self: StepEngine, output: Any, batch: MicroBatch) -> dict[str, Tensor]:
        first.append(batch)
        return true_loss(self, output, first[0])

    replace(StepEngine, "run", run)
    replace(StepEngine, "_loss", loss)


def norm_counts_copies(mesh: Mesh, replace: Replace) -> None:
    """Counts the gradients of norms and biases once for each tensor-parallel rank."""
    replace(Sharding, "replica", lambda self, mesh, **options: 0)


def _micro_batches(run: RunConfig) -> int:
    return run.global_batch_size // run.micro_batch_times_data_parallel_size


def _buckets(run: RunConfig) -> bool:
    return run.layout.pool > 1 and not run.data_parallel.use_torch_fsdp2


def _copies(run: RunConfig) -> bool:
    tied = getattr(run.model, "ties_output", False)
    return run.layout.pp > 1 and run.layout.stage_mapping == "loop" and tied


CATALOGUE: Final = (
    Defect(
        "norms-not-summed",
        "gradients of norms are not summed over tensor-parallel ranks",
        "--sequence-parallel",
        lambda run: run.placement.sequence_parallel,
        norms_not_summed,
    ),
    Defect(
        "input-not-summed",
        "an input's gradient is not summed over tensor-parallel ranks",
        "--tensor-model-parallel-size",
        lambda run: run.layout.tp > 1,
        input_not_summed,
    ),
    Defect(
        "norm-counts-copies",
        "the gradient norm counts replicated parameters on each rank",
        "--tensor-model-parallel-size",
        lambda run: run.layout.tp > 1,
        norm_counts_copies,
    ),
    Defect(
        "mask-of-next-rank",
        "each context-parallel rank has the loss mask of the next",
        "--context-parallel-size",
        lambda run: run.layout.cp > 1,
        mask_of_next_rank,
    ),
    Defect(
        "tied-not-summed",
        "gradients of the two copies of a tied embedding are not summed",
        "--pipeline-model-parallel-size and tied embeddings",
        _copies,
        tied_not_summed,
    ),
    Defect(
        "mask-of-first-micro-batch",
        "the last stage has the loss mask of the first micro-batch for all",
        "several micro-batches",
        lambda run: _micro_batches(run) > 1,
        mask_of_first_micro_batch,
    ),
    Defect(
        "micro-batch-not-counted",
        "the last micro-batch is left out of the number of tokens",
        "several micro-batches",
        lambda run: _micro_batches(run) > 1,
        micro_batch_not_counted,
    ),
    Defect(
        "bucket-left-out",
        "a bucket of gradients is not summed over data-parallel ranks",
        "several data or context parallel ranks",
        _buckets,
        bucket_left_out,
    ),
    Defect(
        "experts-divided",
        "the gradient of experts is divided by the ranks that hold them",
        "--expert-model-parallel-size",
        lambda run: run.layout.ep > 1,
        experts_divided,
    ),
    Defect(
        "experts-in-other-order",
        "ranks hold each other's experts, in reverse order",
        "--expert-model-parallel-size",
        lambda run: run.layout.ep > 1,
        experts_in_other_order,
    ),
)
"""Defects by layout."""


def find_defect(name: str, run: RunConfig) -> Defect:
    """Returns a defect that a run can have.

    Raises:
        TrainError: There is no such defect, or the run's layout lacks what it needs.
    """
    known = {each.name: each for each in CATALOGUE}
    fitting = ", ".join(each.name for each in CATALOGUE if each.applies(run)) or "none"
    if name not in known:
        raise TrainError(f"unknown --defect {name!r}; for this layout there are {fitting}")
    if not known[name].applies(run):
        raise TrainError(
            f"--defect {name} needs {known[name].needs}; for this layout there are {fitting}"
        )
    return known[name]
