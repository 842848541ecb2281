"""Defects of gated delta nets."""

from dataclasses import replace as changed
from typing import Any

import megatron_models.components.gated_delta_net.module as deltas
import torch
from megatron_models.components.gated_delta_net.spec import GatedDeltaNetSpec
from megatron_models.components.norm.spec import NormSpec
from megatron_parallel import Mesh
from torch import Tensor

from layouts.defects.catalogue import Replace, defect, replace_operation

CASE = "tp2·sp-delta-dropout"


def _change_rule(replace: Replace, **changes: Any) -> None:
    """Replaces arguments of the rule; a function is applied to the argument."""
    true = deltas.gated_delta_rule
    names = ("q", "k", "v", "log_decay", "beta")

    def wrong(*inputs: Tensor, **options: Any) -> Any:
        given = dict(zip(names, inputs, strict=True)) | options
        for name, change in changes.items():
            given[name] = change(given[name]) if callable(change) else change
        return true(**given)

    replace_operation(replace, deltas, "gated_delta_rule", wrong)


@defect("the states of gated delta nets do not decay", CASE)
def _no_decay(mesh: Mesh, replace: Replace) -> None:
    _change_rule(replace, log_decay=torch.zeros_like)


@defect("gated delta nets write values without beta", CASE)
def _no_beta(mesh: Mesh, replace: Replace) -> None:
    _change_rule(replace, beta=torch.ones_like)


@defect("queries and keys of gated delta nets keep their lengths", CASE)
def _no_norm(mesh: Mesh, replace: Replace) -> None:
    _change_rule(replace, l2_norm=False)


@defect("the states of gated delta nets pass document ends", CASE)
def _not_reset(mesh: Mesh, replace: Replace) -> None:
    _change_rule(replace, document_ids=None)


@defect("the convolution of gated delta nets reads across document ends", CASE)
def _leaking_window(mesh: Mesh, replace: Replace) -> None:
    true = deltas.causal_conv

    def wrong(x: Tensor, weight: Tensor, bias: None, ids: Tensor | None, state: None) -> Any:
        return true(x, weight, bias, None, state)

    replace_operation(replace, deltas, "causal_conv", wrong)


@defect("the gain of gated delta nets is that of a rank's heads", CASE)
def _gain_of_own_heads(mesh: Mesh, replace: Replace) -> None:
    def norm(self: GatedDeltaNetSpec) -> NormSpec:
        spec = self.component(NormSpec, hidden_size=self.linear_value_head_dim)
        return changed(spec, normalization="RMSNorm")

    def cut(self: NormSpec, sequence_parallel: bool = False) -> Any:
        return true(self)

    true = NormSpec.shardings
    replace(GatedDeltaNetSpec, "norm", property(norm))
    replace(NormSpec, "shardings", cut)
