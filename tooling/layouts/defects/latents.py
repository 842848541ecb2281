"""Defects of multi-latent attention."""

import megatron_models.components.latent_attention.module as latents
from megatron_parallel import Mesh
from megatron_parallel.tensor_parallel import ReplicatedSpec

from layouts.defects.catalogue import Replace, defect


@defect("the gradient of a shared key is not summed over heads of other ranks", "tp2-latent")
def _shared_key_of_own_heads(mesh: Mesh, replace: Replace) -> None:
    replace(latents, "copy_to_axis", lambda x, axis: x)


@defect("gradients of projections to latents are not summed over ranks", "tp2·sp-latent-dropout")
def _latents_not_summed(mesh: Mesh, replace: Replace) -> None:
    true = ReplicatedSpec.shardings
    replace(ReplicatedSpec, "shardings", lambda self, sequence_parallel=False: true(self))


@defect("equal gradients of projections to latents are summed over ranks", "tp2-latent")
def _latents_summed_twice(mesh: Mesh, replace: Replace) -> None:
    true = ReplicatedSpec.shardings
    replace(ReplicatedSpec, "shardings", lambda self, sequence_parallel=False: true(self, True))
