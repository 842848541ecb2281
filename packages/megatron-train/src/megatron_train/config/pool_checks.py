"""What a pool of data- and context-parallel ranks refuses, told in flags."""

import math

from megatron_train.config.run_sections import RunSections
from megatron_train.errors import TrainError

POOL_FLAG, TOKENS_FLAG = "--hybrid-context-parallel", "--max-seqlen-per-dp-cp-rank"


def slice_multiple(run: RunSections) -> int:
    """What a rank's part of a row is a multiple of: zig-zag and sequence parallelism cut it."""
    return math.lcm(2, run.layout.tp if run.placement.sequence_parallel else 1)


def check_pool_run(run: RunSections) -> None:
    """Refuses what cannot be trained in a pool, and the room on its ranks where there is no pool.

    Raises:
        TrainError: one line that names the flags and the numbers.
    """
    max_tokens = run.training.max_seqlen_per_dp_cp_rank
    if not run.layout.hybrid_cp:
        if max_tokens is not None:
            raise TrainError(
                f"{TOKENS_FLAG} {max_tokens} needs {POOL_FLAG}; give it, or leave this out"
            )
        return
    if max_tokens is None:
        raise TrainError(
            f"{POOL_FLAG} needs {TOKENS_FLAG}, the tokens that one rank may hold at a time"
        )
    _check_capacity(run, max_tokens)
    _check_settings(run)
    ways = set(run.placement.cp_comm_type)
    heads, ranks = run.model.attention_heads // run.layout.tp, run.layout.pool
    if "a2a" in ways and heads % ranks:
        raise TrainError(
            f"--cp-comm-type a2a cannot scatter --num-attention-heads "
            f"{run.model.attention_heads} / --tensor-model-parallel-size {run.layout.tp} = "
            f"{heads} heads over all {ranks} ranks of {POOL_FLAG}; use p2p or allgather, or "
            "change one of them"
        )


def _check_capacity(run: RunSections, max_tokens: int) -> None:
    """Returns a sample may be one document, and then the pool has to hold all of it."""
    multiple, ranks, length = slice_multiple(run), run.layout.pool, run.data.seq_length
    most = ranks * (max_tokens // multiple * multiple)
    if length > most:
        raise TrainError(
            f"{TOKENS_FLAG} {max_tokens}, in parts of {multiple}, on {ranks} data and context "
            f"parallel ranks is room for {most} tokens, and a document may have --seq-length "
            f"{length}; raise it, or start more ranks"
        )


def _check_settings(run: RunSections) -> None:
    training, layout = run.training, run.layout
    if not run.data.reset_attention_mask:
        raise TrainError(
            f"{POOL_FLAG} needs --reset-attention-mask: without it every sample is one document, "
            "and all are equally long"
        )
    refused = {
        f"--pipeline-model-parallel-size {layout.pp}": (
            layout.pp > 1,
            "micro-batches have lengths of their own, and a pipeline passes on equal ones",
        ),
        "--no-calculate-per-token-loss": (
            not training.calculate_per_token_loss,
            "micro-batches are what the documents' lengths make of them, and no weights",
        ),
        f"--micro-batch-size {training.micro_batch_size}": (
            training.micro_batch_size > 1,
            f"{TOKENS_FLAG} says how many tokens are in a micro-batch; use 1",
        ),
        "--compile": (training.compile, "every length would be compiled anew"),
        "--broadcast-batches": (
            run.data.broadcast_batches,
            "context parallel ranks have micro-batches of their own",
        ),
        "--context-parallel-split per_document": (
            run.placement.context_parallel_split == "per_document",
            "a pool always cuts that way",
        ),
        "--cp-comm-type a2a+p2p": (
            "a2a+p2p" in run.placement.cp_comm_type,
            "its groups have one size",
        ),
    }
    for flag, (given, why) in refused.items():
        if given:
            raise TrainError(f"{flag} does not go with {POOL_FLAG}: {why}")
