"""The training that the proof compares, as one rank runs it; sent to every rank of a layout."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from megatron_data import SequentialSampler
from megatron_models import Placement, find_kind
from megatron_models.components.moe.module import MoE
from megatron_models.components.moe.router import Router
from megatron_models.components.moe.routing import Routing
from megatron_optim import (
    LearningRateSchedule,
    Optimizer,
    OptimizerConfig,
    StepResult,
    WeightDecaySchedule,
)
from megatron_parallel import Mesh, View
from megatron_parallel.context_parallel import ContextSplit
from megatron_parallel.tensor_parallel import (
    UNFUSED_CROSS_ENTROPY,
    LinearCrossEntropy,
    LoRAConfig,
    freeze_all_but_adapters,
)
from megatron_parallel.tensor_parallel.lora import lora_products
from megatron_train import Callback, StepReport, Trainer
from megatron_train.document_pool import DocumentPool
from megatron_train.engine import StepEngine
from megatron_train.tasks.task import MicroBatch
from torch import Tensor

from layouts.cases import GLOBAL_BATCH, RECOMPUTE, SPLITS, Case
from layouts.models import SEQUENCE
from layouts.trainings import training_of

CLIP = 3.0
LATENT_ROLES = tuple(f"linear_{which}_proj" for which in ("q_down", "q_up", "kv_down", "kv_up"))
MAMBA_ROLES = ("in_proj", "out_proj")
ADAPTERS = LoRAConfig(
    rank=3, alpha=6.0, target_modules=(*LoRAConfig().target_modules, *LATENT_ROLES, *MAMBA_ROLES)
)

Piece = tuple[str, tuple[int, ...], Tensor]
"""A box of a global tensor: the tensor's name, the box's offsets and values."""


@dataclass(frozen=True)
class Outcome:
    """What one rank recorded.

    Attributes:
        losses: Of every step.
        norms: Of the gradient of every step, before clipping.
        gradients: Of the first and the last step, before clipping.
        parameters: After the last step.
        routes: Experts of every token, see `Routes`; empty in a model without experts.
    """

    losses: list[float]
    norms: list[float]
    gradients: tuple[list[Piece], list[Piece]]
    parameters: list[Piece]
    routes: "Routes"


def train(mesh: Mesh, case: Case, steps: int, dtype: torch.dtype, learning_rate: float) -> Outcome:
    """Trains `case` on this rank for `steps` steps."""
    trainer = build_trainer(mesh, case, steps, dtype, learning_rate)
    reports = Reports()
    trainer.callbacks.append(reports)
    routes = watch_routes(trainer.engine.task.stages, mesh)
    trainer.run()
    assert isinstance(trainer.optimizer, Recording)
    return Outcome(
        losses=[loss for report in reports.all for loss in report.losses.values()],
        norms=[report.grad_norm for report in reports.all],
        gradients=trainer.optimizer.ends(),
        parameters=pieces(trainer.engine.stages.views()),
        routes=routes,
    )


def build_trainer(
    mesh: Mesh, case: Case, steps: int, dtype: torch.dtype, learning_rate: float
) -> Trainer:
    """Returns the trainer of this rank for `case`."""
    products = lora_products(ADAPTERS) if case.lora else {}
    stages = find_kind(case.config.kind).build(
        case.config,
        Placement(
            mesh,
            sequence_parallel=case.sequence_parallel,
            tp_comm_overlap=case.slices,
            recompute=RECOMPUTE[case.recompute],
            dispatcher=case.dispatcher,
            dtype=dtype,
            cp_comm_type=case.comm,
            products=products,
            vocabulary_loss=LinearCrossEntropy(5) if case.few_logits else UNFUSED_CROSS_ENTROPY,
        ),
        split=SPLITS[mesh.layout.pp * mesh.layout.vpp],
    )
    freeze_all_but_adapters(stages, products.values())
    task = training_of(case).task(case, stages)
    engine = StepEngine(
        task, mesh, case.data_parallel, schedule=case.schedule, per_token=case.per_token
    )
    make_asymmetric(engine)
    optimizer = Recording(
        engine.stages,
        OptimizerConfig(lr=learning_rate, weight_decay=0.1, clip_grad=CLIP),
        case.config.width_ratios(),
    )
    return Trainer(
        engine=engine,
        optimizer=optimizer,
        learning_rate=LearningRateSchedule(
            max_lr=learning_rate, decay_samples=100 * steps, warmup_samples=2 * GLOBAL_BATCH
        ),
        weight_decay=WeightDecaySchedule(start=0.1, end=0.1, samples=steps),
        micro_batches=lambda consumed: batches(case, mesh, consumed, steps),
        train_iters=steps,
    )


class Recording(Optimizer):
    """An optimizer that records its gradients before it clips them."""

    def step(self, lr: float, *rates: float | None, **more: Any) -> StepResult:
        """Records the gradients, then steps."""
        copies = {name: gradient.clone() for name, gradient in self.gradients().items()}
        views = self._main.views(copies)
        vars(self).setdefault("seen", []).append(pieces(views))
        return super().step(lr, *rates, **more)

    def ends(self) -> tuple[list[Piece], list[Piece]]:
        """Returns the gradients of the first and the last step; empty if no step was finite."""
        seen = vars(self).get("seen", [[]])
        return seen[0], seen[-1]


Routes = dict[tuple[int, int, int], Tensor]
"""Experts `[tokens, k]` by global layer, index of the micro-batch in the run, and slice of it.

Micro-batches are counted over all ranks and steps. A slice is a range of the sequence on one rank,
by its first index.
"""


def watch_routes(stages: Sequence[Any], mesh: Mesh) -> Routes:
    """Records where routers send the tokens of every micro-batch from now on."""
    routes: Routes = {}
    dp, tp, cp = mesh.axis("dp"), mesh.axis("tp"), mesh.axis("cp")
    whole = ContextSplit.zigzag(SEQUENCE, cp.size).indices[cp.index, 0]
    own = whole.chunk(tp.size)[tp.index]
    starts = [i for i in range(len(own)) if i == 0 or own[i] != own[i - 1] + 1]

    def watch(layer: int, router: Router) -> None:
        numbers = count()

        def note(module: Router, arguments: object, routing: Routing) -> None:
            if torch._C._current_graph_task_id() >= 0:
                return  # recomputed in a backward pass
            number = next(numbers) * dp.size + dp.index
            if SEQUENCE % tp.size:  # tokens are divided, not indices, and the last rank is filled
                rows = len(routing.experts)
                real, first = rows * tp.size // SEQUENCE * SEQUENCE, rows * tp.index
                routes[layer, number, first] = routing.experts[: max(real - first, 0)]
                return
            experts = routing.experts.view(len(own), -1, routing.experts.shape[1])
            slices = torch.tensor_split(experts, starts[1:])
            for start, part in zip(starts, slices, strict=True):
                routes[layer, number, int(own[start])] = part.flatten(0, 1)

        router.register_forward_hook(note)

    for stage in stages:
        for name, block in getattr(stage, "layers", {}).items():  # models of one trunk have them
            mixer = getattr(block, "mlp", None)  # a layer may lack it
            if isinstance(mixer, MoE):
                watch(int(name), mixer.router)
    return routes


class Reports(Callback):
    """Keeps the report of every step."""

    def __init__(self) -> None:
        self.all: list[StepReport] = []

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """Keeps the report."""
        self.all.append(report)


def pieces(views: dict[str, list[View]]) -> list[Piece]:
    """Returns copies of the boxes of global tensors that views show."""
    return [(name, v.offsets, v.tensor.clone()) for name, parts in views.items() for v in parts]


def make_asymmetric(engine: StepEngine) -> None:
    """Moves gains off 1, and biases and adapters' B off 0, by values keyed by global name.

    Biases of experts stay 0: uneven biases would hide differences of loads.
    """
    for view_name, views in engine.stages.views().items():
        if view_name in engine.stages.states:
            continue
        for view in views:
            if len(view.global_shape) == 1 or view_name.endswith(("bias", "lora_b")):
                generator = torch.Generator().manual_seed(sum(view_name.encode()))
                whole = torch.randn(view.global_shape, generator=generator, dtype=torch.float64)
                ends = zip(view.offsets, view.lengths, strict=True)
                view.tensor.add_(0.2 * whole[tuple(slice(o, o + n) for o, n in ends)])


def batches(case: Case, mesh: Mesh, consumed: int, steps: int) -> Iterator[Sequence[MicroBatch]]:
    """Yields this rank's micro-batches of every step."""
    axis = mesh.axis("dp")
    total = steps * GLOBAL_BATCH
    if case.room is not None:
        multiple = max(2, mesh.layout.tp if case.sequence_parallel else 1)
        pool = DocumentPool(mesh, case.room, multiple=multiple, tokens_per_pair=0.1)
        for start in range(consumed, total, GLOBAL_BATCH):
            yield pool.rows(partial(stack, case), range(start, start + GLOBAL_BATCH))
        return
    indices = iter(SequentialSampler(total, consumed, case.micro_batch, axis.index, axis.size))
    for _ in range(consumed, total, GLOBAL_BATCH):
        fields = (stack(case, next(indices)) for _ in range(case.accumulation))
        yield [MicroBatch.from_fields(one, token_field="tokens") for one in fields]


def stack(case: Case, indices: Sequence[int]) -> dict[str, Tensor]:
    """Returns the fields of the samples of one micro-batch."""
    training = training_of(case)
    rows = [training.sample(case, index) for index in indices]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
