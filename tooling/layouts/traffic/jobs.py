"""The models, batches and layouts whose communication is counted."""

from dataclasses import dataclass

from megatron_models import GPTConfig
from megatron_parallel import DataParallelConfig, ParallelLayout

STEPS = 2
"""Number of steps of a counted run: no formula fits if the first step differs from the second."""

MICRO_BATCHES, SAMPLES, LENGTH = 4, 2, 32
"""m, b and s of a step on one rank."""

_SIZES = {
    "num_layers": 8,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "vocab_size": 1000,  # 1024 in memory
    "max_position_embeddings": 64,
}
MODELS = {
    "tied": GPTConfig(**_SIZES),
    "untied": GPTConfig(
        **_SIZES,
        ffn_hidden_size=640,
        num_query_groups=4,
        position_embedding_type="rope",
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
    ),
    "moe": GPTConfig(
        **_SIZES,
        position_embedding_type="rope",
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        num_experts=4,
        moe_router_topk=4,
        moe_ffn_hidden_size=160,
        moe_aux_loss_coeff=0.01,
    ),
}
"""GPT-2's kind and Llama's, which have more parameters than one bucket holds, and experts."""

ELEMENT = 4  # bytes of float32
NUMBER = 8  # bytes of a float64 or int64
BUCKET, ALIGNED = 2**22, 64  # elements

DATA_PARALLEL = {
    "": DataParallelConfig(),
    "sharded": DataParallelConfig(use_distributed_optimizer=True),
    "fsdp": DataParallelConfig(use_torch_fsdp2=True),
}
"""What a data-parallel rank keeps: everything; a shard of the optimizer state; of everything."""


@dataclass(frozen=True)
class Job:
    """One layout whose messages are counted.

    Attributes:
        layout: degrees.
        sequence_parallel: whether activations are cut along the sequence.
        model: which of `MODELS`.
        comm: how attention goes over context-parallel ranks.
        dispatcher: how tokens get to their experts.
        kept: which of `DATA_PARALLEL`, what a data-parallel rank keeps.
    """

    layout: ParallelLayout
    sequence_parallel: bool = False
    model: str = "tied"
    comm: str = "p2p"
    dispatcher: str = "allgather"
    kept: str = ""

    @property
    def config(self) -> GPTConfig:
        """The model's configuration."""
        return MODELS[self.model]

    @property
    def name(self) -> str:
        """Degrees that are not 1, for example `tp2·sp·pp2`."""
        names = ("tp", "sp", "cp", "pp", "vpp", "dp", "ep")
        sizes = {n: getattr(self.layout, n) for n in names if n != "sp"}
        degrees = {n: f"{n}{size}" for n, size in sizes.items() if size > 1}
        degrees |= {"sp": "sp"} if self.sequence_parallel else {}
        degrees |= {"cp": f"{degrees['cp']}·{self.comm}"} if self.comm != "p2p" else {}
        if self.layout.dp_outer > 1:
            near = (self.layout.dp or 1) // self.layout.dp_outer
            degrees["dp"] += f"({self.layout.dp_outer}x{near})"
        degrees |= {"a2a": "a2a"} if self.dispatcher == "alltoall" else {}
        degrees |= {"kept": self.kept} if self.kept else {}
        return "·".join(degrees[n] for n in (*names, "a2a", "kept") if n in degrees)

    @property
    def title(self) -> str:
        """Name and model, for test identifiers."""
        return f"{self.name}-{self.model}"

    @property
    def losses(self) -> int:
        """How many there are: that of the model, and of its routers."""
        return 2 if self.config.num_experts else 1


def _job(
    model: str = "tied",
    *,
    sp: bool = False,
    comm: str = "p2p",
    a2a: bool = False,
    kept: str = "",
    **degrees: int,
) -> Job:
    layout = ParallelLayout(**{"dp": 1, **degrees})
    return Job(layout, sp, model, comm, "alltoall" if a2a else "allgather", kept)


JOBS = (
    _job(tp=2),
    _job(tp=4),
    _job(tp=2, sp=True),
    _job(tp=4, sp=True),
    _job(pp=2),
    _job(pp=4),
    _job(pp=2, vpp=2),
    _job(dp=2),
    _job(dp=4),
    _job(tp=2, sp=True, pp=2, dp=2),
    _job("untied", tp=2, sp=True, pp=2, dp=2),
    _job(cp=2),
    _job("untied", cp=4),
    _job("untied", cp=4, comm="a2a"),
    _job("untied", cp=4, comm="allgather"),
    _job("untied", tp=2, sp=True, cp=2, dp=2),
    _job(tp=2, cp=2, comm="a2a", pp=2),
    _job(dp=4, dp_outer=2),
    _job(kept="sharded", dp=2),
    _job("untied", kept="sharded", dp=4),
    _job(kept="sharded", dp=4, dp_outer=2),
    _job("untied", kept="sharded", cp=2, dp=2),
    _job(kept="sharded", sp=True, tp=2, pp=2, dp=2),
    _job(kept="fsdp", dp=2),
    _job("untied", kept="fsdp", dp=4),
    _job("untied", kept="fsdp", cp=2, dp=2),
    _job(kept="fsdp", sp=True, tp=2, pp=2, dp=2),
    _job("moe", dp=2, ep=2),
    _job("moe", a2a=True, dp=2, ep=2),
    _job("moe", a2a=True, dp=4, ep=2),
    _job("moe", kept="sharded", a2a=True, dp=4, ep=2),
    _job("moe", sp=True, a2a=True, tp=2, pp=2, ep=2, etp=1),
)
