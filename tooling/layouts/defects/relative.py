"""Defects of biases by relative position, and of what the stages of a T5 share."""

from dataclasses import replace as changed
from typing import Any

import torch
from megatron_models.components.embedding import output
from megatron_models.components.relative_bias import module
from megatron_models.models.encoder_decoder.sharing import SharedParameters
from megatron_parallel import GradientBuffers, Mesh
from megatron_parallel.data_parallel.bucket import Bucket
from torch import Tensor

from layouts.defects.catalogue import Replace, defect


@defect("the buckets of relative positions are off by one", "tp2·sp-t5-dropout")
def _next_bucket(mesh: Mesh, replace: Replace) -> None:
    true = module.distance_buckets

    def wrong(buckets: int, max_distance: int, device: torch.device | None = None) -> Tensor:
        return (true(buckets, max_distance, device) + 1).clamp(max=buckets - 1)

    replace(module, "distance_buckets", wrong)


@defect("biases of heads are those of the first rank", "tp2·sp-t5-dropout")
def _heads_of_first_rank(mesh: Mesh, replace: Replace) -> None:
    true = module.RelativeBias.forward

    def wrong(self: module.RelativeBias, *arguments: Any) -> Tensor:
        return true(self, *arguments) if mesh.axis("tp").index == 0 else true(self, *arguments) * 0

    replace(module.RelativeBias, "forward", wrong)


@defect("the gradient of biases is not summed over stages", "pp4-t5-dropout")
def _own_stage_only(mesh: Mesh, replace: Replace) -> None:
    true = GradientBuffers.__init__

    def wrong(self: GradientBuffers, *arguments: Any, **options: Any) -> None:
        true(self, *arguments, **options)
        for bucket in self.buckets:
            if "relative_bias" in bucket.plan.slots[0].name:
                bucket.extra_axes = ()

    replace(GradientBuffers, "__init__", wrong)


@defect("the embedding of a T5 is summed over the first and the last stage only", "pp4-t5-dropout")
def _without_decoder_embedding(mesh: Mesh, replace: Replace) -> None:
    true = Bucket.reduce_extra_axes

    def wrong(self: Bucket) -> None:
        if "embedding" in self.plan.slots[0].name and mesh.has_axis("embedding"):
            self.extra_axes = (mesh.axis("embedding"),)
        elif "embedding" in self.plan.slots[0].name:
            self.extra_axes = ()
        true(self)

    replace(Bucket, "reduce_extra_axes", wrong)


@defect("a tied output matrix forgets to scale its input", "tp2·sp-t5-dropout")
def _unscaled_output(mesh: Mesh, replace: Replace) -> None:
    replace(output, "_scaled", lambda x, config: x)


@defect("the norm counts an embedding on each of its stages", "pp2·vpp2-t5-learned")
def _counted_on_every_stage(mesh: Mesh, replace: Replace) -> None:
    true = SharedParameters.embedding

    def wrong(self: SharedParameters, *arguments: Any) -> Any:
        found = true(self, *arguments)
        if found is None:
            return found
        return changed(found, tied_over_stages=False, positions_tied_over_stages=False)

    replace(SharedParameters, "embedding", wrong)
