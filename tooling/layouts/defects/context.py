"""Defects of context parallelism: masks, positions, merged blocks, sums."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import megatron_models.components.attention.context_parallel as context_parallel
import megatron_parallel.context_parallel.ring as ring
import megatron_parallel.data_parallel.buffers as buffers
import torch
from megatron_models.components.dropout import ProbabilityDropout
from megatron_models.components.rotary.module import RotaryTable
from megatron_parallel import DropoutKey, Mesh
from megatron_parallel.context_parallel import BlockMask, ContextSplit, RingPlan, SequenceMask
from megatron_parallel.data_parallel.buffers import ReductionAxes
from megatron_train import GPTTask, MicroBatch
from megatron_train.engine import StepEngine
from torch import Tensor

from layouts.defects.catalogue import Replace, defect, replace_operation
from layouts.defects.dropout import drop_otherwise


@defect("rotary positions of a context-parallel rank are one token behind", "cp4-untied")
def _rotary_offset(mesh: Mesh, replace: Replace) -> None:
    true = RotaryTable.forward

    def wrong(self: RotaryTable, length: int, offset: int, positions: Any, *rest: Any) -> Any:
        late = mesh.axis("cp").index == 1
        return true(self, length, offset, positions.roll(1, dims=1) if late else positions, *rest)

    replace(RotaryTable, "forward", wrong)


@defect("the mask treats a zig-zag as contiguous slices", "cp2-tied-dropout")
def _contiguous_mask(mesh: Mesh, replace: Replace) -> None:
    true = context_parallel.plan_ring

    def wrong(mask: Any, split: ContextSplit, index: int, lower: Any) -> RingPlan:
        parts = torch.arange(split.length).view(split.ranks, 1, -1)
        return RingPlan(split, true(mask, ContextSplit(parts), index, lower).blocks)

    replace(context_parallel, "plan_ring", wrong)


@defect("document ids are cut into contiguous slices", "cp4-untied")
def _contiguous_documents(mesh: Mesh, replace: Replace) -> None:
    true = context_parallel.plan_ring

    def wrong(mask: SequenceMask, split: ContextSplit, *rest: Any) -> RingPlan:
        order = split.indices.flatten().argsort()
        wrong_mask = dataclasses.replace(mask, document_ids=mask.document_ids[:, order])
        return true(wrong_mask, dataclasses.replace(split, host=None), *rest)

    replace(context_parallel, "plan_ring", wrong)


@defect("the blocks of a ring are summed without their log-sum-exp", "cp2-tied-dropout")
def _merged_without_lse(mesh: Mesh, replace: Replace) -> None:
    def wrong(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
        out.add_(more)
        lse.copy_(torch.logaddexp(lse, more_lse))

    replace(ring, "_merge", wrong)


@defect("a ring's backward pass ignores that scores are bounded", "cp2-few-dropout")
def _scores_taken_for_plain(mesh: Mesh, replace: Replace) -> None:
    true = context_parallel.attention_backward

    def wrong(*args: Any, **options: Any) -> Any:
        return true(*args[:7], dataclasses.replace(args[7], softcap=0.0), **options)

    replace_operation(replace, context_parallel, "attention_backward", wrong)


@defect("a window is one token too wide over context-parallel ranks", "cp2-few-dropout")
def _wide_window(mesh: Mesh, replace: Replace) -> None:
    def wrong(self: SequenceMask, queries: Tensor, keys: Tensor) -> BlockMask:
        window = None if self.window is None else self.window + 1
        return true(dataclasses.replace(self, window=window), queries, keys)

    true = SequenceMask.block
    replace(SequenceMask, "block", wrong)


@defect("the gradient of sinks is not divided by the sum of exponentials", "cp2-few-dropout")
def _sinks_not_rescaled(mesh: Mesh, replace: Replace) -> None:
    true = ring._sink_gradient

    def wrong(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
        return true(dout, out, torch.zeros_like(lse), sinks)

    replace(ring, "_sink_gradient", wrong)


@defect("gradients of keys and values stay on the ranks that computed them", "cp4-untied")
def _keys_not_sent_home(mesh: Mesh, replace: Replace) -> None:
    true = ring._Message.wait

    def wrong(self: Any) -> Tensor:
        return true(self) * (not self.homeward)

    replace(ring._Message, "wait", wrong)


@defect("gradients are not summed over context-parallel ranks", "cp2·dp2-tied-dropout")
def _not_summed_over_cp(mesh: Mesh, replace: Replace) -> None:
    replace(buffers, "data_reduction_axes", lambda mesh: ReductionAxes(mesh.axis("dp")))


@defect("the loss mask is cut into contiguous slices", "cp2·a2a-untied-dropout")
def _contiguous_loss_mask(mesh: Mesh, replace: Replace) -> None:
    def wrong(whole: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Tensor:
        axis = mesh.axis("cp")
        return whole["loss_mask"].chunk(axis.size, 1)[axis.index]

    _with_part(replace, "loss_mask", wrong)


@defect("labels are shifted inside a rank's slice", "cp2-tied-dropout")
def _labels_of_part(mesh: Mesh, replace: Replace) -> None:
    def wrong(whole: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([own["tokens"][:, 1:], own["labels"][:, -1:]], 1)

    _with_part(replace, "labels", wrong)


def _with_part(replace: Replace, name: str, change: Callable[..., Tensor]) -> None:
    true = GPTTask.context_parallel_slice

    def wrong(self: GPTTask, batch: MicroBatch) -> MicroBatch:
        own = true(self, batch)
        return own.with_fields(**{name: change(batch.fields, own.fields)})

    replace(GPTTask, "context_parallel_slice", wrong)


@defect(
    "every context-parallel rank counts all tokens of the batch", "cp4·allgather-untied-dropout"
)
def _tokens_counted_by_all(mesh: Mesh, replace: Replace) -> None:
    true = StepEngine.denominators

    def wrong(self: StepEngine, batches: Any) -> dict[str, float]:
        return {name: n * mesh.layout.cp for name, n in true(self, batches).items()}

    replace(StepEngine, "denominators", wrong)


@defect("the dropout mask is that of the first indices", "tp2·sp·cp2-tied-dropout")
def _mask_of_first_places(mesh: Mesh, replace: Replace) -> None:
    replace(DropoutKey, "select", lambda self, places: self.narrow(0, places.shape[1]))


@defect("attention dropout of a ring ignores the indices of its keys", "cp2-tied-dropout")
def _mask_of_local_keys(mesh: Mesh, replace: Replace) -> None:
    def changed(own: ProbabilityDropout) -> ProbabilityDropout:
        keys = own.key_indices
        local = None if keys is None else torch.arange(keys.shape[1])[None]
        return dataclasses.replace(own, key_indices=local)

    drop_otherwise(replace, changed)


@defect("scattered heads have the dropout mask of the first heads", "cp4·a2a-tied-dropout")
def _mask_of_scattered_heads(mesh: Mesh, replace: Replace) -> None:
    drop_otherwise(replace, lambda own: dataclasses.replace(own, first_head=0))
