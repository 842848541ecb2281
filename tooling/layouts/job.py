"""The training that the proof compares, as one rank runs it; sent to every rank of a layout."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from megatron_data import SequentialSampler
from megatron_models import (
    LowPrecisionConfig,
    Placement,
    find_kind,
    low_precision_placement,
)
from megatron_optim import (
    AdafactorSettings,
    LearningRateSchedule,
    OptimizerConfig,
    WeightDecaySchedule,
    needs_matrices,
)
from megatron_parallel import Mesh
from megatron_parallel.tensor_parallel import (
    UNFUSED_CROSS_ENTROPY,
    LinearCrossEntropy,
    LoRAConfig,
    VocabularyLoss,
    freeze_all_but_adapters,
)
from megatron_parallel.tensor_parallel.lora import lora_products
from megatron_train import Trainer
from megatron_train.document_pool import DocumentPool
from megatron_train.engine import StepEngine
from megatron_train.prove.record import (
    Outcome,
    RecordingOptimizer,
    make_asymmetric,
    record_run,
)
from megatron_train.prove.samples import stacked
from megatron_train.tasks.task import MicroBatch
from torch import Tensor

from layouts.case import GLOBAL_BATCH, RECOMPUTE, SPLITS, Case
from layouts.models import SEQUENCE
from layouts.trainings import training_of

CLIP = 3.0
LATENT_ROLES = tuple(f"linear_{which}_proj" for which in ("q_down", "q_up", "kv_down", "kv_up"))
RULE_SETTINGS = {"adafactor": AdafactorSettings(eps1=1e-6)}
"""Biases of keys have gradients of 0 but for rounding. Adafactor divides by their size unless its
epsilon is larger, as that of Adam is by default."""
MAMBA_ROLES = ("in_proj", "out_proj")
ADAPTERS = LoRAConfig(
    rank=3, alpha=6.0, target_modules=(*LoRAConfig().target_modules, *LATENT_ROLES, *MAMBA_ROLES)
)

FP8 = LowPrecisionConfig(fp8_format="hybrid", fp8_amax_history_len=2, fp8_amax_compute_algo="max")
"""Delayed scaling, whose scales are equal in every layout."""


def train(mesh: Mesh, case: Case, steps: int, dtype: torch.dtype, learning_rate: float) -> Outcome:
    """Trains `case` on this rank for `steps` steps."""
    trainer = build_trainer(mesh, case, steps, dtype, learning_rate)
    return record_run(trainer, SEQUENCE)


def build_trainer(
    mesh: Mesh, case: Case, steps: int, dtype: torch.dtype, learning_rate: float
) -> Trainer:
    """Returns the trainer of this rank for `case`."""
    products = lora_products(ADAPTERS) if case.lora else {}
    placement = Placement(
        mesh,
        sequence_parallel=case.sequence_parallel,
        tp_comm_overlap=case.slices,
        recompute=RECOMPUTE[case.recompute],
        dispatcher=case.dispatcher,
        dtype=dtype,
        cp_comm_type=case.comm,
        products=products,
        vocabulary_loss=loss_of(case),
    )
    if case.fp8:
        placement = low_precision_placement(case.config, FP8, placement)
    stages = find_kind(case.config.kind).build(
        case.config,
        placement,
        split=SPLITS[mesh.layout.pp * mesh.layout.vpp],
    )
    freeze_all_but_adapters(stages, products.values())
    task = training_of(case).task(case, stages)
    config = OptimizerConfig(
        optimizer=case.rule,
        lr=learning_rate,
        weight_decay=0.1,
        clip_grad=CLIP,
        settings=RULE_SETTINGS.get(case.rule),
    )
    data_parallel = replace(case.data_parallel, whole_matrices=needs_matrices(config))
    engine = StepEngine(task, mesh, data_parallel, schedule=case.schedule, per_token=case.per_token)
    make_asymmetric(engine)
    optimizer = RecordingOptimizer(
        engine.stages,
        config,
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


def loss_of(case: Case) -> VocabularyLoss:
    """Returns output layer and loss; with smoothed labels, few logits are computed again."""
    if not case.few_logits:
        return UNFUSED_CROSS_ENTROPY
    return LinearCrossEntropy(5, "backward" if case.smooth else "forward")


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
    return stacked([training.sample(case, index) for index in indices])
