"""What a rank records of a training, for comparison with another layout."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import torch
from megatron_models.components.moe.module import MoE
from megatron_models.components.moe.router import Router
from megatron_models.components.moe.routing import Routing
from megatron_optim import Optimizer, StepResult
from megatron_parallel import Mesh, View
from megatron_parallel.context_parallel import ContextSplit
from torch import Tensor

from megatron_train.engine import StepEngine
from megatron_train.step_report import StepReport
from megatron_train.trainer import Callback, Trainer

Piece = tuple[str, tuple[int, ...], Tensor]
"""A box of a global tensor: the tensor's name, the box's offsets and values."""

Routes = dict[tuple[int, int, int], Tensor]
"""Experts `[tokens, k]` by global layer, index of the micro-batch in the run, and slice of it.

Micro-batches are counted over all ranks and steps. A slice is a range of the sequence on one rank,
by its first index.
"""

HISTORY: Final = 8.0
"""A magnitude above those of activations, weights and gradients of a small model."""


@dataclass(frozen=True)
class Outcome:
    """What one rank recorded.

    Attributes:
        losses: Of every step.
        norms: Of the gradient of every step, before clipping.
        gradients: Of some steps, before clipping; the first and the last are among them.
        parameters: After the last step.
        routes: Experts of every token; empty in a model without experts.
    """

    losses: list[float]
    norms: list[float]
    gradients: Sequence[list[Piece]]
    parameters: list[Piece]
    routes: Routes


class RecordingOptimizer(Optimizer):
    """An optimizer that records its gradients before it clips them.

    Attributes:
        seen: Gradients of every step.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.seen: list[list[Piece]] = []

    def step(self, lr: float, *rates: float | None, **more: Any) -> StepResult:
        """Records the gradients, then steps."""
        copies = {name: gradient.clone() for name, gradient in self.gradients().items()}
        self.seen.append(pieces(self._main.views(copies)))
        return super().step(lr, *rates, **more)

    def ends(self) -> tuple[list[Piece], list[Piece]]:
        """Returns the gradients of the first and the last step; empty if there was none."""
        seen = self.seen or [[]]
        return seen[0], seen[-1]


class Reports(Callback):
    """Keeps the report of every step."""

    def __init__(self) -> None:
        self.all: list[StepReport] = []

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """Keeps the report."""
        self.all.append(report)


def record_run(trainer: Trainer, sequence_length: int, *, every_step: bool = False) -> Outcome:
    """Trains, and returns what this rank recorded.

    Args:
        trainer: A trainer with a `RecordingOptimizer`.
        sequence_length: Tokens of a sample.
        every_step: Whether gradients of all steps are returned, not only those of the first and
            the last.
    """
    optimizer, reports = trainer.optimizer, Reports()
    if not isinstance(optimizer, RecordingOptimizer):
        raise TypeError(f"the trainer has a {type(optimizer).__name__}, not a RecordingOptimizer")
    trainer.callbacks.append(reports)
    engine = trainer.engine
    routes = watch_routes(engine.task.stages, engine.mesh, sequence_length)
    trainer.run()
    return Outcome(
        losses=[loss for report in reports.all for loss in report.losses.values()],
        norms=[report.grad_norm for report in reports.all],
        gradients=optimizer.seen if every_step else optimizer.ends(),
        parameters=pieces(engine.stages.views()),
        routes=routes,
    )


def pieces(views: dict[str, list[View]]) -> list[Piece]:
    """Returns copies of the boxes of global tensors that views show."""
    return [(name, v.offsets, v.tensor.clone()) for name, parts in views.items() for v in parts]


def make_asymmetric(engine: StepEngine) -> None:
    """Moves gains off 1, and biases and adapters' B off 0, by values keyed by global name.

    Biases of experts stay 0: uneven biases would hide differences of loads. Histories of magnitudes
    begin filled: scales of the first step otherwise depend on the parts of tensors.
    """
    for state in engine.stages.states.values():
        if state.of_parameter:
            state.value.fill_(HISTORY)
    for view_name, views in engine.stages.views().items():
        if view_name in engine.stages.states:
            continue
        for view in views:
            if len(view.global_shape) == 1 or view_name.endswith(("bias", "lora_b")):
                generator = torch.Generator().manual_seed(sum(view_name.encode()))
                whole = torch.randn(view.global_shape, generator=generator, dtype=torch.float64)
                ends = zip(view.offsets, view.lengths, strict=True)
                box = whole[tuple(slice(o, o + n) for o, n in ends)]
                view.tensor.add_(0.2 * box.to(view.tensor.device))


def watch_routes(stages: Sequence[Any], mesh: Mesh, sequence_length: int) -> Routes:
    """Records where routers send the tokens of every micro-batch from now on.

    Args:
        stages: This rank's stages of the model.
        mesh: The mesh. In a pool of ranks that share documents, nothing is recorded.
        sequence_length: Tokens of a sample.
    """
    routes: Routes = {}
    if mesh.layout.hybrid_cp:
        return routes
    dp, tp, cp = mesh.axis("dp"), mesh.axis("tp"), mesh.axis("cp")
    indices = ContextSplit.zigzag(sequence_length, cp.size).indices[cp.index, 0]
    uneven = sequence_length % tp.size  # tokens are divided, and the last ranks are filled
    positions = indices if uneven else indices.chunk(tp.size)[tp.index]
    starts = [i for i in range(len(positions)) if i == 0 or positions[i] != positions[i - 1] + 1]

    def watch(layer: int, router: Router) -> None:
        numbers = count()

        def note(module: Router, arguments: object, routing: Routing) -> None:
            if torch._C._current_graph_task_id() >= 0:
                return  # recomputed in a backward pass
            number = next(numbers) * dp.size + dp.index
            if uneven:
                rows = len(routing.experts)
                real = rows * tp.size // sequence_length * sequence_length
                first = rows * tp.index
                routes[layer, number, first] = routing.experts[: max(real - first, 0)]
                return
            experts = routing.experts.view(len(positions), -1, routing.experts.shape[1])
            slices = torch.tensor_split(experts, starts[1:])
            for start, part in zip(starts, slices, strict=True):
                routes[layer, number, int(positions[start])] = part.flatten(0, 1)

        router.register_forward_hook(note)

    for stage in stages:
        for name, block in getattr(stage, "layers", {}).items():  # models of one trunk have them
            mixer = getattr(block, "mlp", None)  # a layer may lack it
            if isinstance(mixer, MoE):
                watch(int(name), mixer.router)
    return routes
