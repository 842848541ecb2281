"""Checks of settings for context parallelism."""

from math import lcm

from megatron_parallel.nearest import nearest_multiples

from megatron_train.config.pool_checks import check_pool_run
from megatron_train.config.run_sections import RunSections
from megatron_train.errors import TrainError


def check_context_parallel(run: RunSections) -> None:
    """Refuses sequence lengths, heads and settings that context parallelism does not support.

    Raises:
        TrainError: The message names the flags and their values.
    """
    layout, placement, length = run.layout, run.placement, run.data.seq_length
    comm_types, split = placement.cp_comm_type, placement.context_parallel_split
    check_pool_run(run)
    if layout.hybrid_cp:
        _check_comm_types(run)
        return
    if layout.cp == 1:
        for flag, other in (
            (f"--cp-comm-type {' '.join(comm_types)}", comm_types != ("p2p",)),
            (f"--context-parallel-split {split}", split != "zigzag"),
            ("--hierarchical-context-parallel-sizes", layout.hierarchical_cp is not None),
        ):
            if other:
                raise TrainError(
                    f"{flag} needs --context-parallel-size of at least 2; leave it out"
                )
        return
    slices = 2 * layout.cp
    if length % slices:
        raise TrainError(
            f"--seq-length {length} cannot be split into 2 x {layout.cp} equal slices for "
            f"--context-parallel-size {layout.cp}; use {nearest_multiples(length, slices)}"
        )
    if placement.sequence_parallel and length // layout.cp % layout.tp:
        raise TrainError(
            f"--seq-length {length} with --context-parallel-size {layout.cp} leaves "
            f"{length // layout.cp} tokens on a rank, which --sequence-parallel cannot split into "
            f"{layout.tp} equal slices; use --seq-length "
            f"{nearest_multiples(length, lcm(slices, layout.cp * layout.tp))}"
        )
    if split == "per_document" and not run.data.reset_attention_mask:
        raise TrainError(
            "--context-parallel-split per_document needs --reset-attention-mask: without it tokens "
            "attend across documents, and zigzag balances the work; give it or use zigzag"
        )
    _check_comm_types(run)
    _check_hierarchy(run)
    _check_heads(run)


def _check_comm_types(run: RunSections) -> None:
    comm_types = run.placement.cp_comm_type
    if len(comm_types) not in (1, run.model.depth):
        raise TrainError(
            f"--cp-comm-type has {len(comm_types)} values for --num-layers {run.model.depth}; give "
            "one value for all layers or one for each layer"
        )


def _check_hierarchy(run: RunSections) -> None:
    flag, given = "--hierarchical-context-parallel-sizes", run.layout.hierarchical_cp is not None
    wanted = "a2a+p2p" in run.placement.cp_comm_type
    if wanted and not given:
        raise TrainError(
            f"--cp-comm-type a2a+p2p needs {flag}: the inner and the outer number of ranks, whose "
            f"product is --context-parallel-size {run.layout.cp}"
        )
    if given and not wanted:
        raise TrainError(f"{flag} is used only with --cp-comm-type a2a+p2p; leave it out")


def _check_heads(run: RunSections) -> None:
    layout = run.layout
    of_layers = sorted({mixer.heads for mixer in run.model.mixers if mixer.heads})
    sizes = {"a2a": layout.cp, "a2a+p2p": (layout.hierarchical_cp or (1,))[0]}
    for comm_type in dict.fromkeys(run.placement.cp_comm_type):
        ranks = sizes.get(comm_type, 1)
        for heads in of_layers:
            if heads // layout.tp % ranks == 0:
                continue
            raise TrainError(
                f"--cp-comm-type {comm_type} cannot scatter --num-attention-heads {heads} / "
                f"--tensor-model-parallel-size {layout.tp} = {heads // layout.tp} heads over "
                f"{ranks} ranks; use p2p or allgather, or change one of them"
            )
