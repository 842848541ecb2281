"""Defects of passes that take turns: what travels for one micro-batch meets another one."""

from dataclasses import replace as changed
from typing import Any

import megatron_parallel.expert_parallel.exchange as exchange
import torch
from megatron_parallel import Mesh
from megatron_parallel.expert_parallel.dispatch import COMBINE
from megatron_parallel.expert_parallel.exchange import RowSplits, _Message
from torch import Tensor

from layouts.defects.catalogue import Replace, defect


@defect(
    "the micro-batches of a pair take each other's rows", "dp2·ep2·a2a·combined-1f1b-moe-dropout"
)
def _others_rows(mesh: Mesh, replace: Replace) -> None:
    start, wait = exchange._launch, _Message.wait
    under_way: list[_Message] = []

    def started(rows: Tensor, splits: RowSplits) -> _Message:
        message = start(rows, splits)
        under_way.append(message)
        return message

    def taken(self: _Message) -> Tensor:
        received = wait(self)
        under_way.remove(self)
        for other in under_way:
            if received.is_floating_point():  # not the counts
                rows = min(len(received), len(wait(other)))
                received[:rows] = other.received[:rows]
        return received

    replace(exchange, "_launch", started)
    replace(_Message, "wait", taken)


@defect(
    "answers of experts are read before they have arrived",
    "pp2·dp2·ep2·a2a·combined-1f1b-moe-gated",
)
def _not_waited_for(mesh: Mesh, replace: Replace) -> None:
    true = exchange._launch

    def wrong(rows: Tensor, splits: RowSplits) -> Any:
        message = true(rows, splits)
        if splits.purpose != COMBINE:
            return message
        return changed(message, received=torch.zeros_like(message.received))

    replace(exchange, "_launch", wrong)
