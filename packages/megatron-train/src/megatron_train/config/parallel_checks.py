"""Checks of settings that the layout of a run, or compiled code, does not support."""

from megatron_parallel import RecomputeConfig
from megatron_parallel.nearest import nearest_multiples
from megatron_parallel.pipeline import find_schedule_kind

from megatron_train.config.options import flags_of
from megatron_train.config.run_sections import RunSections, named_by_flags
from megatron_train.errors import TrainError


def check_placement(run: RunSections) -> None:
    """Refuses settings of data and placement that the layout does not support."""
    layout, placement = run.layout, run.placement
    if run.data.broadcast_batches and layout.tp * layout.cp * layout.pp == 1:
        raise TrainError(
            "--broadcast-batches needs several ranks per model replica; raise "
            "--tensor-model-parallel-size, --context-parallel-size or "
            "--pipeline-model-parallel-size, or leave it out"
        )
    if placement.sequence_parallel and run.data.seq_length % layout.tp:
        raise TrainError(
            f"--seq-length {run.data.seq_length} cannot be split into {layout.tp} equal "
            "slices for --sequence-parallel; use "
            f"{nearest_multiples(run.data.seq_length, layout.tp)}"
        )
    if placement.tp_comm_overlap and not placement.sequence_parallel:
        raise TrainError("--tp-comm-overlap needs --sequence-parallel; give both or leave it out")
    if placement.tp_comm_overlap and run.training.compile:
        raise TrainError(
            "--tp-comm-overlap has no effect on compiled code (--compile), whose communication "
            "the compiler orders; leave out one of them"
        )
    if placement.batch_invariant_mode and run.training.compile:
        raise TrainError(
            "--batch-invariant-mode does not work with --compile, which orders sums by shape; "
            "leave out one of them"
        )
    fusion = placement.cross_entropy_fusion_impl
    if fusion.startswith("linear") and run.training.compile:
        raise TrainError(
            f"--cross-entropy-fusion-impl {fusion} does not work with --compile, which "
            "computes the logits of all tokens; leave out one of them"
        )


def check_data_parallel(run: RunSections) -> None:
    """Refuses settings of data parallelism that the layout does not support."""
    layout, shared = run.layout, run.data_parallel
    stage = run.training.compile and run.training.compile_scope == "stage"
    for flag, waits in (
        ("--overlap-param-gather", shared.overlap_param_gather),
        ("--use-torch-fsdp2", shared.use_torch_fsdp2),
    ):
        if stage and waits:
            raise TrainError(
                f"--compile does not work with {flag}: a compiled stage cannot wait for the "
                "weights of a layer; use --compile-scope layer, or leave out one of them"
            )
    half = run.training.bf16 or run.training.fp16
    if not shared.accumulate_allreduce_grads_in_fp32 and not half:
        raise TrainError(
            "--no-accumulate-allreduce-grads-in-fp32 (--grad-reduce-in-bf16) needs --bf16 or "
            "--fp16; give both or leave it out"
        )
    if shared.ddp_reduce_scatter_with_fp32_accumulation and not run.training.bf16:
        raise TrainError(
            "--ddp-reduce-scatter-with-fp32-accumulation sends gradients in bf16, so it needs "
            "--bf16; give both or leave it out"
        )
    if not shared.use_torch_fsdp2:
        return
    schedule = run.pipeline.resolve_schedule(layout)
    if find_schedule_kind(schedule).splits_backward or layout.stage_mapping == "v":
        raise TrainError(
            f"--use-torch-fsdp2 does not work with --pipeline-schedule {schedule}, which "
            "splits backward passes or places stages in a V; choose 1f1b, or leave one of "
            "them out"
        )
    if run.data_parallel_size * layout.cp == layout.dp_outer:
        raise TrainError(
            "--use-torch-fsdp2 needs at least 2 data parallel ranks in an optimizer instance, "
            "but there is 1; leave it out or start more ranks"
        )


def check_recompute(run: RunSections) -> None:
    """Refuses settings of recomputation that layout or compiled code do not support."""
    with named_by_flags("recompute"):
        cut = run.placement.sequence_parallel
        run.recompute.check(run.layout, sequence_parallel=cut)
    packing = run.recompute.hooks_field
    if run.training.compile and packing is not None:
        raise TrainError(
            f"{flags_of(RecomputeConfig)[packing]} has no effect on compiled code "
            "(--compile), for which the compiler decides what to save; leave out one of them"
        )
