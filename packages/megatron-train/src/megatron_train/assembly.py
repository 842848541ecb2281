"""Builds the parts of a run on one rank: device, tokenizer, stages, engine, optimizer, trainer."""

from collections.abc import Callable
from dataclasses import replace

import torch
from megatron_data import Tokenizer
from megatron_models import Placement, batch_invariant, find_kind, low_precision_placement
from megatron_optim import (
    Optimizer,
    ParameterAverages,
    SpikeDetector,
    check_state_formats,
    check_width_rules,
    needs_matrices,
)
from megatron_parallel import Mesh
from megatron_parallel.tensor_parallel import freeze_all_but_adapters

from megatron_train.broadcast_batches import Batches
from megatron_train.config.kernel_backends import chosen_backends
from megatron_train.config.run import RunConfig
from megatron_train.config.run_sections import named_by_flags
from megatron_train.config.sections import TrainingConfig
from megatron_train.cuda_graphs import CudaCapture, GraphBackend
from megatron_train.engine import StepEngine
from megatron_train.errors import TrainError
from megatron_train.observation import Observation
from megatron_train.products import products_of, vocabulary_loss_of
from megatron_train.statistics import Statistics
from megatron_train.tasks.kinds import TaskKind
from megatron_train.tokenizer import TokenizerCache
from megatron_train.trainer import Trainer


def build_trainer(
    config: RunConfig,
    task: TaskKind,
    batches: Batches,
    mesh: Mesh,
    dtype: torch.dtype,
    family: str | None = None,
    *,
    optimizer: type[Optimizer] = Optimizer,
    prepare: Callable[[StepEngine], None] | None = None,
) -> Trainer:
    """Builds this rank's stages of the model, engine, optimizer and trainer, without callbacks.

    Args:
        config: The run.
        task: Kind of the task.
        batches: Micro-batches of this rank.
        mesh: Mesh of the run.
        dtype: Dtype of weights and arithmetic.
        family: Family of the model, recorded in checkpoints.
        optimizer: Class of the optimizer.
        prepare: Called with the engine before the optimizer is built, for example to change
            initial values.

    Raises:
        TrainError: The model does not support --cross-entropy-fusion-impl linear, a format
            cannot hold a state of the update rule, or its state cannot be offloaded.
    """
    training, placement, products = config.training, config.placement, products_of(config)
    widths = config.model.width_ratios()
    if widths:
        check_width_rules(config.optimizer)
    with named_by_flags("state_formats"):
        check_state_formats(config.optimizer, config.state_formats)
    with named_by_flags("offload"):
        config.offload.check(config.optimizer, config.state_formats, mesh.device.type)
    where = Placement(
        mesh,
        sequence_parallel=placement.sequence_parallel,
        tp_comm_overlap=placement.tp_comm_overlap,
        recompute=config.recompute,
        dispatcher=placement.moe_token_dispatcher_type,
        dtype=dtype,
        device=mesh.device,
        cp_comm_type=placement.cp_comm_type,
        products=products,
        vocabulary_loss=vocabulary_loss_of(config),
        backends=chosen_backends(config),
        compiled=training.compile,
    )
    where = low_precision_placement(config.model, config.low_precision, where)
    stages = find_kind(config.model.kind).build(
        config.model,
        batch_invariant(config.model, where) if placement.batch_invariant_mode else where,
        split=config.layer_split,
        seed=training.seed,
    )
    fusion = config.placement.cross_entropy_fusion_impl
    if fusion.startswith("linear") and not any(
        hasattr(stage, "vocabulary_loss") for stage in stages
    ):
        raise TrainError(
            f"--cross-entropy-fusion-impl {fusion} has no effect on models of kind "
            f"{config.model.kind}, which do not use the fused loss; leave it out"
        )
    freeze_all_but_adapters(stages, products.values())
    built_task = task.build(config, stages, family)
    engine = StepEngine(
        built_task,
        mesh,
        replace(config.data_parallel, whole_matrices=needs_matrices(config.optimizer)),
        compile=training.compile,
        compile_scope=training.compile_scope,
        graphs=_graph_backend(training, mesh.device),
        schedule=config.pipeline.resolve_schedule(mesh.layout),
        group_size=config.pipeline.group_size,
        per_token=training.calculate_per_token_loss,
    )
    if prepare is not None:
        prepare(engine)
    with named_by_flags("optimizer", "adam"):
        built_optimizer = optimizer(
            engine.stages,
            config.optimizer,
            widths,
            config.loss_scale if training.fp16 else None,
            config.state_formats,
            training.seed,
            config.offload,
        )
    decay, logging = config.averages.ema_decay, config.logging
    statistics = None
    if logging.measures:
        statistics = Statistics(
            config.model.parameters(),
            logging.log_interval,
            num_zeros=logging.log_num_zeros_in_grad,
            params_norm=logging.log_params_norm,
            layer_norms=logging.log_layer_norms,
            ratios=logging.log_update_ratios,
        )
    observation = None
    if config.qk_clip.qk_clip or logging.observes:
        observation = Observation(
            config.model,
            stages,
            config.qk_clip,
            logging.log_interval,
            scores=logging.log_max_attention_logit,
            outputs=logging.log_layer_outputs,
        )
    return Trainer(
        engine=engine,
        observation=observation,
        optimizer=built_optimizer,
        averages=None if decay is None else ParameterAverages(built_optimizer, decay),
        statistics=statistics,
        spikes=SpikeDetector(config.spikes, mesh.device) if config.spikes.skips else None,
        evaluates_averages=config.averages.ema_evaluate == "average",
        learning_rate=config.learning_rate_schedule(),
        decoupled_learning_rate=config.learning_rate_schedule(decoupled=True),
        weight_decay=config.weight_decay_schedule(),
        micro_batches=batches.training,
        train_iters=config.train_iters,
        check_for_nan=config.data_parallel.check_for_nan_in_loss_and_grad,
        iterations_to_skip=training.iterations_to_skip or (),
    )


def _graph_backend(training: TrainingConfig, device: torch.device) -> GraphBackend | None:
    """Returns what captures layers as CUDA graphs, if the run asks for it."""
    if training.cuda_graph_impl == "none":
        return None
    if device.type != "cuda":
        raise TrainError(
            "--cuda-graph-impl local needs a CUDA device, and torch finds none; leave it out"
        )
    return GraphBackend(CudaCapture(), training.cuda_graph_warmup_steps)


def choose_device(name: str) -> torch.device:
    """Returns the device ``name``; ``auto`` selects a GPU if there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise TrainError("--device cuda: torch finds no GPU; use --device cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_dtype(config: RunConfig) -> torch.dtype:
    """Returns the dtype of weights and arithmetic."""
    dtype: torch.dtype = getattr(torch, config.training.precision)
    return dtype


def load_run_tokenizer(
    config: RunConfig, tokenizers: TokenizerCache | None = None
) -> Tokenizer | None:
    """Returns the run's tokenizer; None if it has none.

    Args:
        config: The run.
        tokenizers: Tokenizers that are open already.

    Raises:
        TrainError: The tokenizer has more tokens than the model.
    """
    data, vocab_size = config.data, config.model.embedding.vocab_size
    tokenizer = (tokenizers or TokenizerCache()).open(data, vocab_size)
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        name = data.tokenizer_model or data.vocab_file or data.tokenizer_type
        raise TrainError(
            f"--vocab-size {vocab_size} is smaller than the {tokenizer.vocab_size} "
            f"tokens of {name}; raise it, or leave it out to take the size of the tokenizer"
        )
    return tokenizer
