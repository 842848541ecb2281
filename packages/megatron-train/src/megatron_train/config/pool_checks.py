"""Checks of settings for a pool of data- and context-parallel ranks."""

import math

from megatron_train.config.run_sections import RunSections
from megatron_train.errors import TrainError

POOL_FLAG, TOKENS_FLAG = "--hybrid-context-parallel", "--max-seqlen-per-dp-cp-rank"


def slice_multiple(run: RunSections) -> int:
    """Returns what the length of a rank's slice of a row must be a multiple of.

    The zig-zag split and sequence parallelism divide it further.
    """
    return math.lcm(2, run.layout.tp) if run.placement.sequence_parallel else 2


def check_pool_run(run: RunSections) -> None:
    """Refuses settings that do not work with a pool, and its settings if there is no pool.

    Raises:
        TrainError: The message names the flags and their values.
    """
    max_tokens = run.training.max_seqlen_per_dp_cp_rank
    if not run.layout.hybrid_cp:
        if max_tokens is not None:
            raise TrainError(f"{TOKENS_FLAG} {max_tokens} needs {POOL_FLAG}; give both or neither")
        return
    if max_tokens is None:
        raise TrainError(
            f"{POOL_FLAG} needs {TOKENS_FLAG}, the maximum number of tokens on a rank at a time"
        )
    _check_capacity(run, max_tokens)
    _check_settings(run)
    ways = set(run.placement.cp_comm_type)
    tp, ranks = run.layout.tp, run.layout.pool
    for heads in sorted({mixer.heads for mixer in run.model.mixers}):
        if "a2a" in ways and heads // tp % ranks:
            raise TrainError(
                f"--cp-comm-type a2a cannot scatter --num-attention-heads {heads} / "
                f"--tensor-model-parallel-size {tp} = {heads // tp} heads over all {ranks} ranks "
                f"of {POOL_FLAG}; use p2p or allgather, or change one of them"
            )


def _check_capacity(run: RunSections, max_tokens: int) -> None:
    """Refuses a pool that cannot hold a document as long as a sample."""
    multiple, ranks, length = slice_multiple(run), run.layout.pool, run.data.seq_length
    most = ranks * (max_tokens // multiple * multiple)
    if length > most:
        raise TrainError(
            f"{TOKENS_FLAG} {max_tokens}, in multiples of {multiple}, on {ranks} data and context "
            f"parallel ranks holds {most} tokens, but a document may have --seq-length {length}; "
            "raise it or start more ranks"
        )


def _check_settings(run: RunSections) -> None:
    training, layout = run.training, run.layout
    if not run.data.reset_attention_mask:
        raise TrainError(
            f"{POOL_FLAG} needs --reset-attention-mask: without it each sample is one document, "
            "and all have the same length"
        )
    refused = {
        f"--pipeline-model-parallel-size {layout.pp}": (
            layout.pp > 1,
            "micro-batches have different lengths, and a pipeline sends tensors of one shape",
        ),
        "--no-calculate-per-token-loss": (
            not training.calculate_per_token_loss,
            "micro-batches have different numbers of tokens, so their means cannot be averaged",
        ),
        f"--micro-batch-size {training.micro_batch_size}": (
            training.micro_batch_size > 1,
            f"{TOKENS_FLAG} sets the size of a micro-batch; use 1",
        ),
        "--compile": (training.compile, "each length would be compiled again"),
        "--broadcast-batches": (
            run.data.broadcast_batches,
            "context parallel ranks have different micro-batches",
        ),
        "--context-parallel-split per_document": (
            run.placement.context_parallel_split == "per_document",
            "a pool always splits per document",
        ),
        "--cp-comm-type a2a+p2p": (
            "a2a+p2p" in run.placement.cp_comm_type,
            "its groups have a fixed size",
        ),
    }
    for flag, (given, why) in refused.items():
        if given:
            raise TrainError(f"{flag} does not work with {POOL_FLAG}: {why}")
