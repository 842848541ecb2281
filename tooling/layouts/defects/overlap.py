"""Defects of overlapped passes: messages of one micro-batch reach another one."""

from dataclasses import replace as changed
from typing import Any

import megatron_parallel.expert_parallel.exchange as exchange
import torch
from megatron_parallel import Mesh
from megatron_parallel.expert_parallel.exchange import RowSplits, _Message
from megatron_parallel.expert_parallel.protocol import COMBINE
from torch import Tensor

from layouts.defects.catalogue import Replace, defect


@defect(
    "the micro-batches of a pair receive each other's rows", "dp2·ep2·a2a·combined-1f1b-moe-dropout"
)
def _rows_of_the_other(mesh: Mesh, replace: Replace) -> None:
    start, wait = exchange._launch, _Message.wait
    in_flight: list[_Message] = []

    def launch(rows: Tensor, splits: RowSplits) -> _Message:
        message = start(rows, splits)
        in_flight.append(message)
        return message

    def wrong_wait(self: _Message) -> Tensor:
        received = wait(self)
        in_flight.remove(self)
        for other in in_flight:
            if received.is_floating_point():  # not the counts
                rows = min(len(received), len(wait(other)))
                received[:rows] = other.received[:rows]
        return received

    replace(exchange, "_launch", launch)
    replace(_Message, "wait", wrong_wait)


@defect(
    "outputs of experts are read before they have arrived",
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
