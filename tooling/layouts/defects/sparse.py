"""Defects of sparse attention."""

from dataclasses import replace as changed
from typing import Any

import megatron_models.components.sparse_attention.module as sparse
from megatron_models.components.sparse_attention.spec import SparseAttentionSpec
from megatron_parallel import Mesh
from torch import Tensor

from layouts.defects.catalogue import Replace, defect

CASE = "tp2·sp-sparse-dropout"


@defect("sparse attention reads the keys with the lowest scores", CASE)
def _lowest_scores(mesh: Mesh, replace: Replace) -> None:
    true = sparse.select_keys
    replace(sparse, "select_keys", lambda scores, *others: true(-scores, *others))


@defect("the loss of an indexer compares the heads of one rank", CASE)
def _own_heads(mesh: Mesh, replace: Replace) -> None:
    replace(sparse, "all_reduce", lambda x, axis, **options: x * axis.size)


@defect("every rank has the whole gradient of an indexer's loss", CASE)
def _whole_gradient(mesh: Mesh, replace: Replace) -> None:
    true = sparse.divergence
    replace(sparse, "divergence", lambda *inputs: true(*inputs) * mesh.axis("tp").size)


@defect("the gradients of an indexer are those of a rank", CASE)
def _not_summed(mesh: Mesh, replace: Replace) -> None:
    true = SparseAttentionSpec.indexer

    def cut(self: SparseAttentionSpec) -> dict[str, Any]:
        return {name: changed(each, partial=None) for name, each in true(self).items()}

    replace(SparseAttentionSpec, "indexer", cut)


@defect("the loss of an indexer changes the tokens that it reads", CASE)
def _not_detached(mesh: Mesh, replace: Replace) -> None:
    def selectors(
        self: Any, x: Tensor, latent: Tensor, context: Any, cut: bool
    ) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = self.indexer(x, latent, context.angles[self.rotation], cut)
        return found

    replace(sparse.SparseAttention, "_selectors", selectors)
