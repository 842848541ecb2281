"""The jobs: command lines of `megatron-train dry-run` for one rank."""

from typing import Final, NamedTuple

_SMALL: Final = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --ffn-hidden-size 4096 "
    "--seq-length 2048 --max-position-embeddings 2048 --vocab-size 32000 --micro-batch-size 1 "
    "--lr 1e-3 --bf16 --world-size 8 --attention-dropout 0 --hidden-dropout 0 "
)
_EXPERTS: Final = (
    _SMALL + "--num-layers 8 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1024 "
    "--moe-aux-loss-coeff 0.01 --expert-model-parallel-size 4 --global-batch-size 16 "
)
_LLAMA_70B: Final = (
    "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 8 --ffn-hidden-size 28672 --vocab-size 128255 --seq-length 8192 "
    "--max-position-embeddings 8192 --normalization RMSNorm --position-embedding-type rope "
    "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --bf16 --lr 1e-4 "
    "--attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer "
)
_ON_1024: Final = (
    "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 "
    "--micro-batch-size 1 --world-size 1024 --global-batch-size 128 "
)
_SEPARATE: Final = (
    "--no-bias-swiglu-fusion --no-rope-fusion --no-cross-entropy-loss-fusion "
    "--kernel-backends add_rms_norm=separate rms_norm=torch vocab_embedding=separate "
)
_T5: Final = "--recipe t5-base --vocab-size 32100 --world-size 8 --micro-batch-size 4 --bf16 "
_TP: Final = "--tensor-model-parallel-size 2 --sequence-parallel "
_FP8: Final = "--fp8-format e4m3 --fp8-recipe tensorwise "
_PP: Final = "--pipeline-model-parallel-size 2 "


class Job(NamedTuple):
    """A job whose first rank of a pipeline stage is imagined.

    Attributes:
        name: Name in the table.
        flags: Flags of ``megatron-train dry-run KIND``.
        kind: Kind of the model.
        pipeline_rank: Coordinate of the rank on the axis ``pp``.
        sample: Whether the job is also run in `nox -s tests`.
        new_tokens: Tokens to generate for each of four prompts, instead of a training step.
    """

    name: str
    flags: str
    kind: str = "gpt"
    pipeline_rank: int = 0
    sample: bool = False
    new_tokens: int = 0


def _batch(micro_batches: int, data_parallel: int) -> str:
    return f"--global-batch-size {micro_batches * data_parallel} "


JOBS: Final = (
    Job("dp8", _SMALL + _batch(2, 8)),
    Job("dp8, fp8", _SMALL + _FP8 + _batch(2, 8)),
    Job(
        "tp2·sp·dp4, distributed optimizer",
        _SMALL + _TP + "--use-distributed-optimizer " + _batch(2, 4),
    ),
    Job(
        "tp2·sp·dp4, overlapped",
        _SMALL
        + _TP
        + "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        + _batch(2, 4),
    ),
    Job("tp2·sp·dp4, hidden dropout", _SMALL + _TP + "--hidden-dropout 0.1 " + _batch(2, 4)),
    Job(
        "tp2·sp·dp4, full recompute",
        _SMALL
        + _TP
        + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        + _batch(2, 4),
    ),
    Job(
        "tp2·sp·dp4, selective recompute",
        _SMALL + _TP + "--recompute-granularity selective " + _batch(2, 4),
    ),
    Job("tp2·sp·dp4, offloaded", _SMALL + _TP + "--cpu-offloading-num-layers 2 " + _batch(2, 4)),
    Job("tp2·sp·dp4, documents", _SMALL + _TP + "--reset-attention-mask " + _batch(2, 4)),
    Job("tp2·pp2·dp2", _SMALL + _TP + _PP + _batch(8, 2), sample=True),
    Job("tp2·pp2·dp2, last stage", _SMALL + _TP + _PP + _batch(8, 2), pipeline_rank=1),
    Job(
        "tp2·pp2·dp2, last stage, few logits",
        _SMALL + _TP + _PP + _batch(8, 2) + "--cross-entropy-fusion-impl linear ",
        pipeline_rank=1,
    ),
    Job(
        "tp2·pp2·vpp2·dp2",
        _SMALL + _TP + _PP + "--num-virtual-stages-per-pipeline-rank 2 " + _batch(8, 2),
    ),
    Job(
        "pp2·dp4, zb-v",
        _SMALL
        + _PP
        + "--pipeline-schedule zb-v --num-virtual-stages-per-pipeline-rank 2 "
        + _batch(8, 4),
    ),
    Job("cp2·dp4, ring", _SMALL + "--context-parallel-size 2 " + _batch(2, 4)),
    Job(
        "cp2·dp4, all-to-all",
        _SMALL + "--context-parallel-size 2 --cp-comm-type a2a " + _batch(2, 4),
    ),
    Job("ep4·dp8, all-gather", _EXPERTS + "--moe-token-dispatcher-type allgather ", sample=True),
    Job("ep4·dp8, all-gather, fp8", _EXPERTS + "--moe-token-dispatcher-type allgather " + _FP8),
    Job("ep4·dp8, all-to-all", _EXPERTS + "--moe-token-dispatcher-type alltoall "),
    Job(
        "ep4·dp8, all-to-all, padded to capacity",
        _EXPERTS
        + "--moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1.25 "
        + "--moe-pad-expert-input-to-capacity ",
    ),
    Job(
        "ep4·dp8, all-to-all, bounded rows",
        _EXPERTS + "--moe-token-dispatcher-type alltoall --moe-expert-rank-capacity-factor 1.25 ",
    ),
    Job("4 tokens for 4 prompts, tp2", _SMALL + _TP + _batch(1, 4), new_tokens=4),
    Job("4 tokens for 4 prompts, pp2", _SMALL + _PP + _batch(2, 4), pipeline_rank=1, new_tokens=4),
    Job("BERT, tp2·sp·dp4", _SMALL + _TP + _batch(2, 4), kind="bert"),
    Job("T5, tp2·dp4", _T5 + "--tensor-model-parallel-size 2 --global-batch-size 32", kind="t5"),
    Job("T5, pp2·dp4", _T5 + _PP + "--global-batch-size 64", kind="t5"),
    Job(
        "Mamba-2 and attention, tp2·sp·dp4",
        "--recipe hybrid-tiny --world-size 8 --bf16 --micro-batch-size 4 --global-batch-size 32 "
        + _TP,
        kind="hybrid",
    ),
    Job("70B, tp8·sp·pp4·dp32, rank 0 of 1,024", _LLAMA_70B + _ON_1024),
    Job(
        "70B, tp8·sp·pp4·dp32, rank 0 of 1,024, separate kernels",
        _LLAMA_70B + _ON_1024 + _SEPARATE,
    ),
    Job("70B, last stage", _LLAMA_70B + _ON_1024, pipeline_rank=3),
    Job("70B, last stage, separate kernels", _LLAMA_70B + _ON_1024 + _SEPARATE, pipeline_rank=3),
)
