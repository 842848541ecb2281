"""What a layout and a training can do with the experts of a model, checked before ranks meet."""

from typing import TYPE_CHECKING

from megatron_models import GPTConfig
from megatron_parallel import ParallelLayout

from megatron_train.config.checkpoint import CheckpointConfig
from megatron_train.config.sections import TrainingConfig
from megatron_train.errors import TrainError

if TYPE_CHECKING:
    from megatron_train.config.run import RunConfig


def check_experts(model: GPTConfig, layout: ParallelLayout, training: TrainingConfig) -> None:
    """Refuse experts that cannot be cut, and settings for experts that are not there.

    Raises:
        TrainError: in one line, with the flags and their numbers.
    """
    if not model.num_experts:
        _refuse_without_experts(layout, training)
        return
    if training.compile:
        raise TrainError(
            "--compile cannot be used with --num-experts: how many tokens an expert gets differs "
            "from step to step; leave one out"
        )
    if model.num_experts % layout.ep:
        raise TrainError(
            f"--expert-model-parallel-size {layout.ep} cannot cut --num-experts "
            f"{model.num_experts} into {layout.ep} equal parts; change one of them"
        )
    degree = layout.expert_tp
    flag = "--tensor-model-parallel-size" if layout.etp is None else "--expert-tensor-parallel-size"
    sizes = {"--moe-ffn-hidden-size": model.moe_ffn_hidden_size}
    if model.has_mlp_bias:
        sizes["--hidden-size"] = model.hidden_size  # the bias of an expert is cut, too
    for name, size in sizes.items():
        if size % degree:
            raise TrainError(
                f"{flag} {degree} cannot cut the experts' {name} {size} into {degree} equal parts; "
                "change one of them"
            )
    if (shared := model.moe_shared_expert_intermediate_size) % layout.tp:
        raise TrainError(
            f"--tensor-model-parallel-size {layout.tp} cannot cut "
            f"--moe-shared-expert-intermediate-size {shared} into {layout.tp} equal parts; change "
            "one of them"
        )


def check_router(model: GPTConfig, checkpoint: CheckpointConfig) -> None:
    """Refuse to begin with a router that the loss does not reach.

    The weight of one expert is 1 where softmax is over the chosen ones. Published models are like
    that, so weights that are there already may be trained on.

    Raises:
        TrainError: in one line, with the flags.
    """
    if not model.num_experts or model.moe_router_topk > 1 or model.moe_router_pre_softmax:
        return
    if checkpoint.finetune or checkpoint.pretrained_checkpoint is not None:
        return
    raise TrainError(
        "--moe-router-topk 1 gives the router no gradient of the loss, as the weight of the only "
        "expert is always 1; add --moe-router-pre-softmax (--finetune takes such a model as it is)"
    )


def check_expert_overlap(run: "RunConfig") -> None:
    """Refuse to hide messages of experts where there are none, or nothing to hide them behind.

    Raises:
        TrainError: in one line, with the flags and their numbers.
    """
    if not run.pipeline.overlap_experts:
        return
    flag, dispatcher = "--overlap-moe-expert-parallel-comm", run.training.moe_token_dispatcher_type
    if not run.model.num_experts:
        raise TrainError(f"{flag} needs --num-experts; give it, or leave this out")
    if run.layout.ep == 1:
        raise TrainError(
            f"{flag} needs --expert-model-parallel-size of at least 2, as no token leaves its rank "
            "otherwise; leave it out"
        )
    if dispatcher != "alltoall":
        raise TrainError(
            f"{flag} needs --moe-token-dispatcher-type alltoall: {dispatcher} waits where it "
            "sends, so that nothing else can be computed meanwhile; change one of them"
        )
    for size in run.batch_sizes.sizes:
        if size // run.samples_at_once == 1:
            raise TrainError(
                f"{flag} needs at least 2 micro-batches a step, one of which computes while the "
                f"other's tokens travel, but {size} samples in micro-batches of "
                f"{run.training.micro_batch_size} on {run.data_parallel_size} data parallel ranks "
                "are 1: raise --global-batch-size, or lower --micro-batch-size"
            )


def _refuse_without_experts(layout: ParallelLayout, training: TrainingConfig) -> None:
    asked = {
        f"--expert-model-parallel-size {layout.ep}": layout.ep > 1,
        f"--expert-tensor-parallel-size {layout.etp}": layout.etp is not None,
        f"--moe-token-dispatcher-type {training.moe_token_dispatcher_type}": (
            training.moe_token_dispatcher_type != TrainingConfig.moe_token_dispatcher_type
        ),
    }
    for flag, given in asked.items():
        if given:
            raise TrainError(f"{flag} needs --num-experts; give it, or leave this out")
