"""Calls of the scans and convolutions of state-space models; see `megatron_kernels.cases`."""

from functools import partial
from typing import Any, Final

import torch

from megatron_kernels.case import Case
from megatron_kernels.inputs import InputGenerator, of_rows
from megatron_kernels.ops.ssm.causal_conv import causal_conv
from megatron_kernels.ops.ssm.gated_delta_rule import gated_delta_rule
from megatron_kernels.ops.ssm.ssd_scan import ssd_scan


def _some_documents(draw: InputGenerator) -> torch.Tensor:
    """Returns ids of two sequences: three documents, and one that ends before the padding."""
    ids = torch.tensor([[4] * 2 + [7] * 1 + [5] * 8, [0] * 8 + [-1] * 3], device=draw.device)
    return of_rows(ids, draw.rows(11, sequence=True))


def _causal_conv(
    draw: InputGenerator, *, documents: bool = False, state: bool = False
) -> tuple[Any, ...]:
    return (
        draw.normal(draw.rows(11, sequence=documents), 2, 6),
        draw.normal(6, 4),
        draw.normal(6),
        _some_documents(draw) if documents else None,
        draw.normal(2, 3, 6) if state else None,
    )


def _gated_delta_rule(
    draw: InputGenerator, *, documents: bool = False, state: bool = False
) -> tuple[Any, ...]:
    decay = draw.normal(draw.rows(11, sequence=True), 2, 4)
    return (
        draw.normal(draw.rows(11, sequence=True), 2, 2, 5),
        draw.normal(draw.rows(11, sequence=True), 2, 2, 5, mean=0.1),
        draw.normal(draw.rows(11, sequence=True), 2, 4, 3),
        (-decay.detach().abs()).requires_grad_(),
        draw.normal(draw.rows(11, sequence=True), 2, 4, mean=0.5)
        .detach()
        .sigmoid()
        .requires_grad_(),
        _some_documents(draw) if documents else None,
        draw.normal(2, 4, 5, 3) if state else None,
        True,
    )


def _ssd_scan(
    draw: InputGenerator, *, documents: bool = False, state: bool = False, chunk_size: int = 4
) -> tuple[Any, ...]:
    rows = draw.rows(11, sequence=True)
    return (
        draw.normal(rows, 2, 4, 3),
        draw.normal(rows, 2, 4),
        (-draw.normal(4).exp()).detach().requires_grad_(),
        draw.normal(rows, 2, 2, 5),
        draw.normal(rows, 2, 2, 5, mean=0.2),
        draw.normal(4),
        draw.normal(4, mean=-1),
        _some_documents(draw) if documents else None,
        draw.normal(2, 4, 3, 5) if state else None,
        chunk_size,
    )


SSM_CASES: Final = (
    Case(causal_conv, "", _causal_conv),
    Case(causal_conv, "state", partial(_causal_conv, state=True)),
    Case(causal_conv, "documents and state", partial(_causal_conv, documents=True, state=True)),
    Case(gated_delta_rule, "", _gated_delta_rule),
    Case(gated_delta_rule, "state", partial(_gated_delta_rule, state=True)),
    Case(
        gated_delta_rule,
        "documents and state",
        partial(_gated_delta_rule, documents=True, state=True),
    ),
    Case(ssd_scan, "", _ssd_scan),
    Case(ssd_scan, "state, one chunk", partial(_ssd_scan, state=True, chunk_size=32)),
    Case(ssd_scan, "documents and state", partial(_ssd_scan, documents=True, state=True)),
)
