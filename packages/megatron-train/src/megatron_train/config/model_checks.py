"""Checks of the model against layout and training, made before ranks communicate.

The components of a model define which dims can be sharded and which features are not tested. The
functions here query them and report refusals with the names of flags.
"""

from collections.abc import Iterator

from megatron_models import ConfigError, Feature, ModelConfig
from megatron_optim import OptimError, OptimizerConfig
from megatron_parallel import ParallelLayout
from megatron_parallel.pipeline import find_schedule_kind

from megatron_train.config.checkpoint import CheckpointConfig
from megatron_train.config.options import flags_of
from megatron_train.config.placement import PlacementConfig
from megatron_train.config.run_sections import RunSections
from megatron_train.config.sections import LoggingConfig
from megatron_train.errors import TrainError


def check_model_layout(
    model: ModelConfig, layout: ParallelLayout, placement: PlacementConfig
) -> None:
    """Refuses a layout that cannot shard the model, and expert axes for a model without experts.

    Raises:
        TrainError: The message names the flags and their values.
    """
    if not model.expert_parallel:
        _refuse_without_experts(layout, placement)
    try:
        model.check_layout(layout)
    except ConfigError as error:
        raise TrainError(
            error.format_message(flags_of(type(model)) | flags_of(type(layout)))
        ) from None


def check_features(run: RunSections) -> None:
    """Refuses features of training that a component of the model is not tested with.

    Raises:
        TrainError: The message names the flags.
    """
    for feature, asked in _features(run):
        refuse_feature(run.model, feature, f"{asked} does not work with {{setting}}: {{why}}")


def check_parameter_names(model: ModelConfig, optimizer: OptimizerConfig) -> None:
    """Refuses patterns of parameter names that match no parameter of the model.

    Parameters that products of linear layers add are not known here; the optimizer checks them.

    Raises:
        TrainError: The message names the flag and the pattern.
    """
    try:
        optimizer.check_names(model.parameters())
    except OptimError as error:
        raise TrainError(error.format_message(flags_of(OptimizerConfig))) from None


def check_per_layer_logging(model: ModelConfig, logging: LoggingConfig) -> None:
    """Refuses reports of experts for a model without experts.

    Raises:
        TrainError: The message names the flag.
    """
    if logging.moe_per_layer_logging and not model.counting_layers:
        raise TrainError(
            "--moe-per-layer-logging has no effect without experts; leave it out or set "
            "--num-experts"
        )


def check_initial_weights(model: ModelConfig, checkpoint: CheckpointConfig) -> None:
    """Refuses to initialize weights that the loss does not depend on.

    Some published models have such weights, so a run that begins with a checkpoint is accepted.

    Raises:
        TrainError: The message names the flags.
    """
    if not checkpoint.finetune and checkpoint.pretrained_checkpoint is None:
        ending = " (--finetune accepts such a model from a checkpoint)"
        refuse_feature(model, "from_scratch", f"{{setting}} {{why}}{ending}")


def _features(run: RunSections) -> Iterator[tuple[Feature, str]]:
    """Yields the features that a component may refuse, and the flag that turned each on."""
    if run.training.compile:
        yield "compile", "--compile"
    schedule = run.pipeline.resolve_schedule(run.layout)
    if find_schedule_kind(schedule).splits_backward:
        yield "split_backward", f"--pipeline-schedule {schedule}"
        if run.training.compile:
            yield "compiled_split", f"--compile with --pipeline-schedule {schedule}"
    if run.data_parallel.use_torch_fsdp2:
        yield "fully_shard", "--use-torch-fsdp2"
    if run.layout.hybrid_cp:
        yield "document_pool", "--hybrid-context-parallel"


def refuse_feature(model: ModelConfig, feature: Feature, form: str) -> None:
    """Refuses a feature that a component of the model does not support.

    Args:
        model: The model.
        feature: The feature.
        form: Message with ``{setting}`` and ``{why}``.

    Raises:
        TrainError: The message names the flag of the component.
    """
    refusal = model.unsupported_reason(feature)
    if refusal is not None:
        line = form.format(setting=refusal.setting, why=refusal.reason)
        raise TrainError(ConfigError(line, vars(model)).format_message(flags_of(type(model))))


def check_expert_overlap(run: RunSections) -> None:
    """Refuses to overlap expert communication where there is none, or nothing to overlap it with.

    Raises:
        TrainError: The message names the flags and their values.
    """
    if not run.pipeline.overlap_experts:
        return
    flag, dispatcher = "--overlap-moe-expert-parallel-comm", run.placement.moe_token_dispatcher_type
    if not run.model.expert_parallel:
        raise TrainError(f"{flag} needs --num-experts; give it or leave {flag} out")
    if run.layout.ep == 1:
        raise TrainError(
            f"{flag} needs --expert-model-parallel-size of at least 2: with 1, no token leaves its "
            "rank; leave it out"
        )
    if run.training.compile:
        raise TrainError(
            f"{flag} does not work with --compile: the passes of compiled layers do not alternate; "
            "leave out one of them"
        )
    if dispatcher != "alltoall":
        raise TrainError(
            f"{flag} needs --moe-token-dispatcher-type alltoall: {dispatcher} waits for its "
            "communication, which therefore overlaps with nothing; change one of them"
        )
    for size in run.batch_sizes.sizes:
        if size // run.micro_batch_times_data_parallel_size == 1:
            raise TrainError(
                f"{flag} needs at least 2 micro-batches a step, to compute one while the tokens of "
                f"the other are sent, but {size} samples in micro-batches of "
                f"{run.training.micro_batch_size} on {run.data_parallel_size} data parallel ranks "
                "are 1; raise --global-batch-size or lower --micro-batch-size"
            )


def _refuse_without_experts(layout: ParallelLayout, placement: PlacementConfig) -> None:
    asked = {
        f"--expert-model-parallel-size {layout.ep}": layout.ep > 1,
        f"--expert-tensor-parallel-size {layout.etp}": layout.etp is not None,
        f"--moe-token-dispatcher-type {placement.moe_token_dispatcher_type}": (
            placement.moe_token_dispatcher_type != PlacementConfig.moe_token_dispatcher_type
        ),
    }
    for flag, given in asked.items():
        if given:
            raise TrainError(f"{flag} needs --num-experts; give it or leave {flag} out")
