"""Defects of the tokens that routers select from."""

from typing import Any

import megatron_models.components.moe.router as router
from megatron_models.components.moe.module import MoE
from megatron_parallel import Mesh
from torch import Tensor

from layouts.defects.catalogue import Replace, defect


@defect("tokens that fill the last rank are routed", "tp3·selective·ep3·etp1·a2a-thirds-dropout")
def _filling_is_routed(mesh: Mesh, replace: Replace) -> None:
    true = MoE._own_tokens

    def wrong(self: MoE, x: Tensor, padding: Any, cut: bool) -> Any:
        tokens, routed, sequences = true(self, x, padding, cut)
        real = x.shape[0] * x.shape[1] - len(tokens) * self.tp.index
        if routed is not None:
            routed = routed.clone()
            routed[real:] = True
        return tokens, routed, sequences

    replace(MoE, "_own_tokens", wrong)


@defect("experts select among the tokens of one rank", "tp2·pp2-choosing-dropout")
def _own_tokens_only(mesh: Mesh, replace: Replace) -> None:
    true, alone = router.tokens_of_experts, Mesh.single().axis("tp")
    replace(
        router, "tokens_of_experts", lambda scores, routed, k, axis: true(scores, routed, k, alone)
    )


@defect("every rank gives its experts their tokens from the first on", "tp2·pp2-forced-dropout")
def _turn_of_rank(mesh: Mesh, replace: Replace) -> None:
    true = router.balanced_experts
    replace(router, "balanced_experts", lambda *sizes: true(*sizes[:3], 1))
