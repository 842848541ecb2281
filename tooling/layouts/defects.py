"""Defects planted on purpose, each of a kind that has been shipped by somebody.

A defect is a replacement of one function while a layout trains; the run on one rank that it is
compared with is clean. Every one must turn the proof red (`integration_tests/test_layouts.py`).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import megatron_models.gpt as gpt
import megatron_models.layers.context_parallel as context_parallel
import megatron_optim.clip as clip
import megatron_parallel.collectives as collectives
import megatron_parallel.context_parallel.ring as ring
import megatron_parallel.data_parallel.buffers as buffers
import megatron_parallel.recompute.kept as kept
import megatron_parallel.sharding as sharding
import megatron_parallel.tensor_parallel.layers as layers
import torch
from megatron_data import SequentialSampler
from megatron_models import GPTConfig
from megatron_models.layers.attention import Attention
from megatron_models.layers.dropout import StageDropout
from megatron_models.layers.embedding import PositionEmbedding
from megatron_models.layers.rope import RotaryTable
from megatron_models.stages import StagePlan
from megatron_parallel import DropoutKey, Mesh, ParallelLayout, Sharding, all_reduce
from megatron_parallel.context_parallel import ContextSplit, RingPlan, SequenceMask
from megatron_parallel.data_parallel.bucket import Bucket
from megatron_parallel.data_parallel.buffers import Route
from megatron_parallel.data_parallel.fully_sharded import FullySharded
from megatron_parallel.data_parallel.parameters import ParameterBuffers
from megatron_parallel.data_parallel.plan import BucketPlan, SlotPart
from megatron_parallel.pipeline import Backward, PipelineEngine, StageGradients
from megatron_parallel.pipeline.objective import Objective
from megatron_parallel.tensor_parallel import RowParallelLinear, VocabParallelEmbedding
from megatron_train import GPTTask
from megatron_train.engine import StepEngine
from torch import Tensor

Replace = Callable[[object, str, Any], None]
Plant = Callable[[Mesh, Replace], None]


@dataclass(frozen=True)
class Defect:
    """A mistake in one place.

    Attributes:
        name: what is wrong.
        case: title of the case that shows it.
        plant: puts it in place.
    """

    name: str
    case: str
    plant: Plant


DEFECTS: dict[str, Defect] = {}
"""By name. They travel to the ranks by name, too."""


@contextmanager
def planted(name: str | None, mesh: Mesh) -> Iterator[None]:
    """While entered, the defect is in place on this rank; None plants nothing."""
    with ExitStack() as stack:
        if name is not None:

            def replace(owner: object, attribute: str, new: Any) -> None:
                stack.enter_context(mock.patch.object(owner, attribute, new))

            DEFECTS[name].plant(mesh, replace)
        yield


def defect(name: str, case: str) -> Callable[[Plant], Plant]:
    """Enter a function into `DEFECTS`."""

    def enter(plant: Plant) -> Plant:
        DEFECTS[name] = Defect(name, case, plant)
        return plant

    return enter


# -- gradients -----------------------------------------------------------------------------------


@defect("the gradients of norms are not summed over tensor-parallel ranks", "tp2·sp-untied")
def _norms_not_summed(mesh: Mesh, replace: Replace) -> None:
    _without_further_sum(replace, "tp")


@defect("a tied gradient is not summed over its two stages", "pp2-tied")
def _tied_not_summed(mesh: Mesh, replace: Replace) -> None:
    _without_further_sum(replace, "embedding")


def _without_further_sum(replace: Replace, axis: str) -> None:
    true = Bucket.sum_further

    def wrong(self: Bucket) -> None:
        self.further = tuple(other for other in self.further if other.name != axis)
        true(self)

    replace(Bucket, "sum_further", wrong)


@defect("a tied gradient is counted twice", "pp2-tied")
def _tied_summed_twice(mesh: Mesh, replace: Replace) -> None:
    true = Bucket.sum_further

    def wrong(self: Bucket) -> None:
        true(self)
        if self.plan.tied and self.flat is not None:
            self.flat.mul_(2.0)

    replace(Bucket, "sum_further", wrong)


@defect("a bucket of gradients is not summed over data-parallel ranks", "dp2-tied-dropout")
def _bucket_left_out(mesh: Mesh, replace: Replace) -> None:
    true = Bucket.launch

    def wrong(self: Bucket) -> None:
        if self.label.startswith("1 of"):
            self.launched = True
        else:
            true(self)

    replace(Bucket, "launch", wrong)


@defect("gradients are averaged over data-parallel ranks", "dp2-tied-dropout")
def _averaged(mesh: Mesh, replace: Replace) -> None:
    true = Bucket.wait

    def wrong(self: Bucket) -> None:
        true(self)
        if self.flat is not None:
            self.flat.div_(self.route.size)

    replace(Bucket, "wait", wrong)


@defect("an input's gradient is not summed over tensor-parallel ranks", "tp2-tied")
def _copy_without_sum(mesh: Mesh, replace: Replace) -> None:
    replace(layers, "copy_to_axis", lambda x, axis: x)


@defect("a gathered sequence's gradient is cut without being summed", "tp2·sp-untied")
def _gather_without_sum(mesh: Mesh, replace: Replace) -> None:
    def wrong(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return collectives._own_part(grads[0], ctx.axis, 0), None

    replace(collectives._GatherSequence, "backward", staticmethod(wrong))


@defect("a row-parallel bias is added by every rank", "tp2-tied")
def _bias_on_every_rank(mesh: Mesh, replace: Replace) -> None:
    def wrong(self: RowParallelLinear, x: Tensor) -> Tensor:
        partial = layers.functional.linear(x, self.weight, self.bias)
        return layers.reduce_from_axis(partial, self.axis)

    replace(RowParallelLinear, "forward", wrong)


@defect("weights are read before they are gathered", "dp2·gathered-untied")
def _read_before_gathered(mesh: Mesh, replace: Replace) -> None:
    true = ParameterBuffers.settle

    def late(self: ParameterBuffers) -> None:
        if vars(self).pop("put_off", False):
            gather(self)
        true(self)

    gather = ParameterBuffers.gather
    replace(ParameterBuffers, "gather", lambda self: vars(self).update(put_off=True))
    replace(ParameterBuffers, "settle", late)


@defect("every shard begins one element late", "dp2·sharded-tied-dropout")
def _shard_off_by_one(mesh: Mesh, replace: Replace) -> None:
    true = BucketPlan.shard_parts

    def wrong(self: BucketPlan, index: int) -> tuple[SlotPart, ...]:
        first, *rest = true(self, index)
        return (first._replace(start=first.start + 1, at=first.at + 1), *rest)

    replace(BucketPlan, "shard_parts", wrong)


@defect("every shard holds what lies one element further on", "tp2·sp·dp4·sharded-untied")
def _shard_shifted(mesh: Mesh, replace: Replace) -> None:
    true = Bucket.gradients

    def wrong(self: Bucket) -> dict[str, Tensor]:
        return {name: gradient.roll(1) for name, gradient in true(self).items()}

    replace(Bucket, "gradients", wrong)


@defect("fully sharded gradients are averaged over micro-batches", "dp2·fsdp-tied-dropout")
def _accumulation_averaged(mesh: Mesh, replace: Replace) -> None:
    def every_time(self: FullySharded, *, last: bool = False) -> None:
        vars(self)["count"] = 0 if last else vars(self).get("count", 0) + 1
        vars(self)["divide_by"] = max(vars(self).get("divide_by", 1), vars(self)["count"] + 1)
        self._stage.sum_gradients(True)

    true = FullySharded.finish

    def finish(self: FullySharded) -> None:
        true(self)
        for gradient in self.gradients().values():
            gradient.div_(vars(self)["divide_by"])

    replace(FullySharded, "begin", every_time)
    replace(FullySharded, "finish", finish)


@defect("fully sharded gradients are summed after the first micro-batch", "dp4·fsdp-untied")
def _accumulation_cut_short(mesh: Mesh, replace: Replace) -> None:
    def first(self: FullySharded, *, last: bool = False) -> None:
        self._stage.sum_gradients(not last)

    replace(FullySharded, "begin", first)


# -- pipelines -----------------------------------------------------------------------------------

ZBV = "pp2·vpp2·dp2·gathered·zb-v-tied"


@defect("buckets are summed before the last weight gradients of a split backward pass", ZBV)
def _sum_before_weights(mesh: Mesh, replace: Replace) -> None:
    true = StageGradients.around_backward

    def wrong(self: StageGradients, backward: Backward) -> AbstractContextManager[None]:
        if not (backward.split and backward.last and backward.stage > 0):  # there hooks notice
            return true(self, backward)
        self._of_stage[backward.stage].complete()
        return nullcontext()

    replace(StageGradients, "around_backward", wrong)


@defect("a weight that two stages of a rank share is counted twice", ZBV)
def _shared_twice(mesh: Mesh, replace: Replace) -> None:
    true = StageGradients.gradients

    def wrong(self: StageGradients) -> dict[str, Tensor]:
        found = true(self)
        return found | {name: 2 * found[name] for name in self._shared & found.keys()}

    replace(StageGradients, "gradients", wrong)


@defect("the upper stages of a V have the layers of a loop", "pp2·vpp2·zb-v-untied-dropout")
def _loop_in_a_v(mesh: Mesh, replace: Replace) -> None:
    def wrong(plan: StagePlan, config: GPTConfig, layout: ParallelLayout, split: Any) -> range:
        return split[5 - plan.stage] if plan.stage >= layout.pp else plan.layers

    _with_layers(replace, wrong)


@defect("a layer is dropped when stages are uneven", "pp4·vpp2-tied-dropout")
def _dropped_layer(mesh: Mesh, replace: Replace) -> None:
    def wrong(plan: StagePlan, config: GPTConfig, layout: ParallelLayout, split: Any) -> range:
        return range(plan.layers.start, plan.layers.stop - plan.last)

    _with_layers(replace, wrong)


def _with_layers(replace: Replace, change: Callable[..., range]) -> None:
    true = gpt.plan_stage

    def wrong(
        config: GPTConfig, layout: ParallelLayout, rank: int, chunk: int = 0, split: Any = None
    ) -> StagePlan:
        plan = true(config, layout, rank, chunk, split)
        return StagePlan(plan.stage, plan.count, change(plan, config, layout, split))

    replace(gpt, "plan_stage", wrong)


# -- denominators --------------------------------------------------------------------------------


@defect("every rank divides by its own number of tokens: an average of averages", "dp4-untied")
def _average_of_averages(mesh: Mesh, replace: Replace) -> None:
    def wrong(self: StepEngine, batches: Any) -> dict[str, float]:
        own = self.task.denominators(batches)
        return {name: count * self.mesh.axis("dp").size for name, count in own.items()}

    replace(StepEngine, "denominators", wrong)


@defect("every micro-batch is divided by its own number of tokens", "pp2-tied")
def _average_of_micro_batches(mesh: Mesh, replace: Replace) -> None:
    true = Objective.add

    def wrong(self: Objective, output: Any, micro_batch: Any) -> Tensor:
        share = float(micro_batch["loss_mask"].sum()) or 1.0
        return true(self, output, micro_batch) * next(iter(self._denominators.values())) / share / 4

    replace(Objective, "add", wrong)


@defect("accumulated micro-batches are not scaled", "tp2·sp-untied")
def _not_scaled(mesh: Mesh, replace: Replace) -> None:
    true = PipelineEngine.run

    def wrong(self: PipelineEngine, batches: Any, denominators: Mapping[str, float]) -> Any:
        return true(self, batches, {n: d / len(batches) for n, d in denominators.items()})

    replace(PipelineEngine, "run", wrong)


@defect("one rank's loss mask has the other polarity", "dp4-untied")
def _polarity(mesh: Mesh, replace: Replace) -> None:
    true = GPTTask.loss

    def wrong(self: GPTTask, output: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if mesh.axis("dp").index == 1:
            batch = {**batch, "loss_mask": 1 - batch["loss_mask"]}
        return true(self, output, batch)

    replace(GPTTask, "loss", wrong)


# -- places --------------------------------------------------------------------------------------


@defect("the vocabulary offset of the embedding is wrong", "tp2-tied")
def _embedding_offset(mesh: Mesh, replace: Replace) -> None:
    true = VocabParallelEmbedding.forward

    def wrong(self: VocabParallelEmbedding, tokens: Tensor) -> Tensor:
        return true(self, tokens + self.axis.index)

    replace(VocabParallelEmbedding, "forward", wrong)


@defect("the vocabulary offset of the targets is wrong", "tp4-untied")
def _target_offset(mesh: Mesh, replace: Replace) -> None:
    true = gpt.vocab_parallel_cross_entropy

    def wrong(logits: Tensor, targets: Tensor, axis: Any, vocab: int) -> Tensor:
        return true(logits, targets - axis.index, axis, vocab)

    replace(gpt, "vocab_parallel_cross_entropy", wrong)


@defect("padding of the vocabulary gets probability", "tp2-tied")
def _padding(mesh: Mesh, replace: Replace) -> None:
    true = gpt.vocab_parallel_cross_entropy

    def wrong(logits: Tensor, targets: Tensor, axis: Any, vocab: int) -> Tensor:
        return true(logits, targets, axis, logits.shape[-1] * axis.size)

    replace(gpt, "vocab_parallel_cross_entropy", wrong)


@defect("positions start at 0 on every sequence-parallel rank", "tp4·sp-tied")
def _position_offset(mesh: Mesh, replace: Replace) -> None:
    true = PositionEmbedding.forward

    def wrong(self: PositionEmbedding, length: int, positions: Any, offset: int) -> Tensor:
        if positions is not None:
            positions = (positions - positions[:, :1]).clamp(min=0)
        return true(self, length, positions, 0)

    replace(PositionEmbedding, "forward", wrong)


@defect("positions of later stages come one token late", "pp2-untied-dropout")
def _positions_of_later_stages(mesh: Mesh, replace: Replace) -> None:
    # Counting from 0 would go unseen: rotary positions are relative, and documents kept apart.
    _with_input(replace, "positions", lambda positions: positions.roll(1, dims=1))


@defect("later stages attend across documents", "pp2-tied")
def _mask_of_later_stages(mesh: Mesh, replace: Replace) -> None:
    _with_input(replace, "mask", lambda mask: None)


def _with_input(replace: Replace, name: str, change: Callable[[Any], Any]) -> None:
    true = GPTTask.inputs

    def wrong(self: GPTTask, batch: Any, stage: int, iteration: int | None) -> Mapping[str, Any]:
        given = true(self, batch, stage, iteration)
        return {**given, name: change(given[name])} if stage > 0 else given

    replace(GPTTask, "inputs", wrong)


@defect("every data-parallel rank reads the same samples", "dp4-untied")
def _same_samples(mesh: Mesh, replace: Replace) -> None:
    true = SequentialSampler.__iter__

    def wrong(self: SequentialSampler) -> Iterator[list[int]]:
        self.data_parallel_rank = 0
        return true(self)

    replace(SequentialSampler, "__iter__", wrong)


# -- dropout -------------------------------------------------------------------------------------


@defect("the dropout mask ignores which part of the sequence it is", "tp2·sp-tied-dropout")
def _mask_of_part(mesh: Mesh, replace: Replace) -> None:
    def wrong(self: DropoutKey, axis: Any) -> DropoutKey:
        return self.narrow(0, self.word0.shape[0] // axis.size)

    replace(DropoutKey, "part", wrong)


@defect("attention dropout ignores which heads a rank has", "tp4·sp-untied-dropout")
def _mask_of_heads(mesh: Mesh, replace: Replace) -> None:
    true = StageDropout.probabilities

    def wrong(self: StageDropout, p: Tensor, layer: int, first_head: int) -> Tensor:
        return true(self, p, layer, 0)

    replace(StageDropout, "probabilities", wrong)


@defect("the dropout mask is that of the rank's own batch", "dp2-tied-dropout")
def _mask_of_own_batch(mesh: Mesh, replace: Replace) -> None:
    true = GPTTask.inputs

    def wrong(self: GPTTask, batch: Any, stage: int, iteration: int | None) -> Mapping[str, Any]:
        numbers = batch["sample_ids"] % len(batch["sample_ids"])
        return true(self, {**batch, "sample_ids": numbers}, stage, iteration)

    replace(GPTTask, "inputs", wrong)


@defect("a stage numbers its layers from 0 in the dropout mask", "pp2-untied-dropout")
def _mask_of_local_layer(mesh: Mesh, replace: Replace) -> None:
    true = Attention.forward

    def wrong(self: Attention, *arguments: Any) -> Tensor:
        own, self.layer = self.layer, self.layer - 2 * mesh.axis("pp").index
        try:
            return true(self, *arguments)
        finally:
            self.layer = own

    replace(Attention, "forward", wrong)


@defect("recomputation drops other elements than the forward pass", "tp2·sp·selective-tied-dropout")
def _mask_of_second_run(mesh: Mesh, replace: Replace) -> None:
    true = StageDropout.probabilities

    def wrong(self: StageDropout, p: Tensor, layer: int, first_head: int) -> Tensor:
        again = torch._C._current_graph_task_id() >= 0  # in a backward pass
        return true(self, p, layer + 1000 * again, first_head)

    replace(StageDropout, "probabilities", wrong)


@defect("kept activations that are cut come back in another order", "tp2·cut-tied-dropout")
def _parts_in_another_order(mesh: Mesh, replace: Replace) -> None:
    true = kept.all_gather

    def wrong(part: Tensor, axis: Any, *, purpose: str) -> Tensor:
        return true(part, axis, purpose=purpose).unflatten(0, (axis.size, -1)).flip(0).flatten()

    replace(kept, "all_gather", wrong)


# -- context parallelism -------------------------------------------------------------------------


@defect("rotary positions of a context-parallel rank come one token late", "cp4-untied")
def _rotary_offset(mesh: Mesh, replace: Replace) -> None:
    true = RotaryTable.forward

    def wrong(self: RotaryTable, length: int, offset: int, positions: Any) -> Any:
        late = mesh.axis("cp").index == 1
        return true(self, length, offset, positions.roll(1, dims=1) if late else positions)

    replace(RotaryTable, "forward", wrong)


@defect("the mask takes a zig-zag for contiguous parts", "cp2-tied-dropout")
def _contiguous_mask(mesh: Mesh, replace: Replace) -> None:
    true = context_parallel.plan_ring

    def wrong(mask: Any, split: ContextSplit, index: int, lower: Any) -> RingPlan:
        parts = torch.arange(split.length).view(split.ranks, 1, -1)
        return RingPlan(split, true(mask, ContextSplit(parts), index, lower).blocks)

    replace(context_parallel, "plan_ring", wrong)


@defect("document numbers are cut into contiguous parts", "cp4-untied")
def _contiguous_documents(mesh: Mesh, replace: Replace) -> None:
    true = context_parallel.plan_ring

    def wrong(mask: SequenceMask, split: ContextSplit, *rest: Any) -> RingPlan:
        order = split.places.flatten().argsort()
        return true(
            dataclasses.replace(mask, document_ids=mask.document_ids[:, order]), split, *rest
        )

    replace(context_parallel, "plan_ring", wrong)


@defect("the blocks of a ring are added up without their log-sum-exp", "cp2-tied-dropout")
def _merged_without_lse(mesh: Mesh, replace: Replace) -> None:
    def wrong(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
        out.add_(more)
        lse.copy_(torch.logaddexp(lse, more_lse))

    replace(ring, "_merge", wrong)


@defect("gradients of keys and values stay where they were computed", "cp4-untied")
def _keys_not_sent_home(mesh: Mesh, replace: Replace) -> None:
    true = ring._Message.wait

    def wrong(self: Any) -> Tensor:
        return true(self) * (not self.homeward)

    replace(ring._Message, "wait", wrong)


@defect("gradients are not summed over context-parallel ranks", "cp2·dp2-tied-dropout")
def _not_summed_over_cp(mesh: Mesh, replace: Replace) -> None:
    replace(buffers, "data_route", lambda mesh: Route(mesh.axis("dp")))


@defect("the loss mask is cut into contiguous parts", "cp2·a2a-untied-dropout")
def _contiguous_loss_mask(mesh: Mesh, replace: Replace) -> None:
    def wrong(whole: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Tensor:
        axis = mesh.axis("cp")
        return whole["loss_mask"].chunk(axis.size, 1)[axis.index]

    _with_part(replace, "loss_mask", wrong)


@defect("labels are shifted inside a rank's part", "cp2-tied-dropout")
def _labels_of_part(mesh: Mesh, replace: Replace) -> None:
    def wrong(whole: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([own["tokens"][:, 1:], own["labels"][:, -1:]], 1)

    _with_part(replace, "labels", wrong)


def _with_part(replace: Replace, name: str, change: Callable[..., Tensor]) -> None:
    true = GPTTask.cut

    def wrong(self: GPTTask, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        own = true(self, batch)
        return {**own, name: change(batch, own)}

    replace(GPTTask, "cut", wrong)


@defect(
    "every context-parallel rank counts all tokens of the batch", "cp4·allgather-untied-dropout"
)
def _tokens_counted_by_all(mesh: Mesh, replace: Replace) -> None:
    true = StepEngine.denominators

    def wrong(self: StepEngine, batches: Any) -> dict[str, float]:
        return {name: n * mesh.layout.cp for name, n in true(self, batches).items()}

    replace(StepEngine, "denominators", wrong)


@defect("the dropout mask is that of the first places", "tp2·sp·cp2-tied-dropout")
def _mask_of_first_places(mesh: Mesh, replace: Replace) -> None:
    replace(DropoutKey, "select", lambda self, places: self.narrow(0, places.shape[1]))


@defect("attention dropout of a ring ignores where its keys are", "cp2-tied-dropout")
def _mask_of_local_keys(mesh: Mesh, replace: Replace) -> None:
    true = StageDropout.probabilities

    def wrong(self: StageDropout, p: Tensor, keys: Tensor, **rest: Any) -> Tensor:
        return true(self, p, keys=torch.arange(keys.shape[1])[None], **rest)

    replace(StageDropout, "probabilities", wrong)


@defect("scattered heads are dropped as if they were the first", "cp4·a2a-tied-dropout")
def _mask_of_scattered_heads(mesh: Mesh, replace: Replace) -> None:
    true = StageDropout.probabilities

    def wrong(self: StageDropout, p: Tensor, first_head: int, **rest: Any) -> Tensor:
        return true(self, p, first_head=0, **rest)

    replace(StageDropout, "probabilities", wrong)


# -- norm and clipping ---------------------------------------------------------------------------


@defect("the norm leaves out the tensor-parallel axis", "tp2-tied")
def _norm_without_tp(mesh: Mesh, replace: Replace) -> None:
    _norm_over(replace, "pp")


@defect("the norm leaves out the pipeline axis", "pp4-tied-dropout")
def _norm_without_pp(mesh: Mesh, replace: Replace) -> None:
    _norm_over(replace, "tp_dp_cp")


def _norm_over(replace: Replace, axis: str) -> None:
    def wrong(value: Tensor, mesh: Mesh, op: Any) -> float:
        return float(all_reduce(value, mesh.axis(axis), op=op))

    replace(clip, "_over_all_ranks", wrong)


@defect("the norm counts replicated parameters on every rank", "tp2-tied")
def _norm_counts_replicas(mesh: Mesh, replace: Replace) -> None:
    replace(Sharding, "replica", lambda self, mesh, sharded=False: 0)


@defect("the norm counts a tied weight on both stages", "tp2·pp2-tied")
def _norm_counts_twins(mesh: Mesh, replace: Replace) -> None:
    true = Sharding.replica

    def wrong(self: Sharding, mesh: Mesh, sharded: bool = False) -> int:
        return 0 if self.tied else true(self, mesh, sharded=sharded)

    replace(Sharding, "replica", wrong)


@defect("of shards, the norm counts replicated parameters twice", "tp2·sp·dp4·sharded-untied")
def _norm_counts_shards_twice(mesh: Mesh, replace: Replace) -> None:
    replace(Sharding, "replica", lambda self, mesh, sharded=False: 0)


@defect("of instances, the norm counts every copy of a shard", "dp4(2x2)·fsdp-tied")
def _norm_counts_instances(mesh: Mesh, replace: Replace) -> None:
    holders = dict.fromkeys([("tp", False), (None, False)], sharding._Holders((), ()))
    replace(sharding, "_HOLDERS", holders)
