"""The cases of the proof: layouts, and the models and batches that they train."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from megatron_models import (
    ModelConfig,
)
from megatron_optim import update_rules
from megatron_parallel import DataParallelConfig, ParallelLayout, RecomputeConfig
from megatron_parallel.pipeline import SCHEDULES, find_schedule_kind

from layouts.models import MODELS, Model

GLOBAL_BATCH = 8
SPLITS = {
    1: (range(5),),
    2: (range(2), range(2, 5)),
    4: (range(1), range(1, 2), range(2, 3), range(3, 5)),
    8: tuple(range(a, b) for a, b in pairwise((0, 0, 1, 2, 2, 3, 4, 4, 5))),
}
"""Layers of each stage, by number of stages; stages are never equal, and some have no layer."""


PLAIN = DataParallelConfig()
UNFUSED = DataParallelConfig(gradient_accumulation_fusion=False)
"""For one rank only: every layout fuses gradient accumulation where it can."""

SHARDED = DataParallelConfig(use_distributed_optimizer=True, ddp_bucket_size=3000)
"""Buckets are so small that many parameters are cut, most of them in the middle of a row."""

GATHERED = DataParallelConfig(
    use_distributed_optimizer=True, overlap_param_gather=True, ddp_bucket_size=3000
)
RECOMPUTE = {
    "": RecomputeConfig(),
    "selective": RecomputeConfig(
        granularity="selective",
        modules=("core_attn", "mlp", "moe", "layernorm", "mla_up_proj"),
    ),
    "uniform": RecomputeConfig(granularity="full", method="uniform", num_layers=2),
    "block": RecomputeConfig(granularity="full", method="block", num_layers=1),
    "cut": RecomputeConfig(
        granularity="full", method="uniform", num_layers=2, distribute_saved_activations=True
    ),
    "host": RecomputeConfig(cpu_offloading_num_layers=2),
}
"""Recomputation and offloading, by the word in a case's name; one rank saves everything."""
FULLY_SHARDED = DataParallelConfig(use_torch_fsdp2=True)
DATA_PARALLEL = {"sharded": SHARDED, "gathered": GATHERED, "fsdp": FULLY_SHARDED}
"""By the word in a case's name: sharded optimizer state; the same with weights gathered during the
forward pass; everything sharded by torch's `fully_shard`."""


@dataclass(frozen=True)
class Case:
    """One layout and the training that runs in it.

    Attributes:
        layout: Degrees; `dp` is set.
        model: One of `MODELS`, or the name of `other`.
        sequence_parallel: Whether activations are sharded along the sequence.
        dropout: Whether hidden and attention dropout are on.
        micro_batch: Number of samples in a micro-batch; the rest of a rank's share is accumulated.
        data_parallel: How gradients are summed, and what each rank holds.
        recompute: One of `RECOMPUTE`.
        comm: How attention communicates over context-parallel ranks.
        per_document: Whether context parallelism cuts every document by itself.
        dispatcher: How tokens are sent to their experts.
        schedule: The pipeline's schedule, if it is not the default one.
        per_token: Whether tokens, not micro-batches, have equal weights in the loss of a step.
        slices: Whether activations are gathered and scattered in slices (`--tp-comm-overlap`).
        smooth: Whether labels are smoothed.
        lora: Whether only adapters of linear layers are trained.
        fp8: Whether linear layers multiply in FP8, with delayed scaling.
        few_logits: Whether the loss is computed for a few tokens at a time.
        room: Tokens that a rank may hold at a time, if ranks are a pool that shards every document
            over as many of them as it needs.
        rule: Update rule of the optimizer.
        other: A model of `LAYERS` layers that is trained instead of one of `MODELS`.
    """

    layout: ParallelLayout
    model: Model | str
    sequence_parallel: bool = False
    dropout: bool = False
    micro_batch: int = 1
    data_parallel: DataParallelConfig = PLAIN
    recompute: str = ""
    comm: str = "p2p"
    per_document: bool = False
    dispatcher: Literal["allgather", "alltoall"] = "allgather"
    schedule: str | None = None
    per_token: bool = True
    slices: bool = False
    smooth: bool = False
    lora: bool = False
    fp8: bool = False
    few_logits: bool = False
    room: int | None = None
    rule: str = "adam"
    other: ModelConfig | None = None

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return self.other or MODELS[self.model]

    @property
    def accumulation(self) -> int:
        """Number of micro-batches of one rank in one step; in a pool, lengths determine it."""
        return GLOBAL_BATCH // (self.micro_batch * (self.layout.dp or 1))

    @property
    def name(self) -> str:
        """Degrees that are not 1, for example `tp2·sp·pp2`."""
        layout = self.layout
        parts = [f"tp{layout.tp}"] if layout.tp > 1 else []
        parts += ["sp"] if self.sequence_parallel else []
        parts += ["slices"] if self.slices else []
        parts += [f"cp{layout.cp}"] if layout.cp > 1 else []
        parts += [self.comm] if self.comm != "p2p" else []
        parts += ["documents"] if self.per_document else []
        parts += [f"{n}{d}" for n in ("pp", "vpp", "dp") if (d := getattr(layout, n)) > 1]
        if layout.dp_outer > 1:
            parts[-1] += f"({layout.dp_outer}x{(layout.dp or 1) // layout.dp_outer})"
        parts += [f"hybrid({self.room})"] if self.room else []
        parts += [word for word, used in DATA_PARALLEL.items() if used == self.data_parallel]
        parts += [self.recompute] if self.recompute else []
        parts += [f"ep{layout.ep}"] if layout.ep > 1 else []
        parts += [f"etp{layout.etp}"] if layout.etp not in (None, layout.tp) else []
        parts += ["a2a"] if self.dispatcher == "alltoall" else []
        parts += [self.schedule] if self.schedule else []
        parts += ["smooth"] if self.smooth else []
        parts += ["lora"] if self.lora else []
        parts += ["fp8"] if self.fp8 else []
        parts += ["few-logits"] if self.few_logits else []
        parts += [self.rule] if self.rule != "adam" else []
        parts += [] if self.per_token else ["means"]
        return "·".join(parts) or "one rank"

    @property
    def title(self) -> str:
        """Name and model, for test identifiers."""
        return f"{self.name}-{self.model}{'-dropout' if self.dropout else ''}"

    @property
    def reference(self) -> "Case":
        """The same training on one rank, with other micro-batches unless the loss depends on them.

        The load of experts is balanced over each micro-batch, and means are of micro-batches.
        """
        depends = self.config.expert_parallel or not self.per_token
        return Case(
            ParallelLayout(dp=1),
            self.model,
            dropout=self.dropout,
            micro_batch=self.micro_batch if depends else 4,
            data_parallel=UNFUSED,
            per_token=self.per_token,
            smooth=self.smooth,
            lora=self.lora,
            fp8=self.fp8,
            rule=self.rule,
            other=self.other,
        )


def _case(
    model: Model,
    micro_batch: int = 1,
    *options: str,
    room: int | None = None,
    **degrees: int,
) -> Case:
    comm = next((word for word in ("a2a", "allgather", "a2a+p2p") if word in options), "p2p")
    nested = (2, degrees["cp"] // 2) if comm == "a2a+p2p" else None
    schedule = next((option for option in options if option in SCHEDULES), None)
    stage_mapping = find_schedule_kind(schedule).stage_mapping if schedule else "loop"
    layout = ParallelLayout(
        **{"dp": 1, **degrees},
        hierarchical_cp=nested,
        stage_mapping=stage_mapping,
        hybrid_cp=room is not None,
    )
    data_parallel = [used for word, used in DATA_PARALLEL.items() if word in options]
    return Case(
        layout,
        model,
        "sp" in options,
        "dropout" in options,
        micro_batch,
        data_parallel[0] if data_parallel else PLAIN,
        next((option for option in options if option in RECOMPUTE), ""),
        comm,
        "documents" in options,
        "alltoall" if "alltoall" in options else "allgather",
        schedule,
        "means" not in options,
        "slices" in options,
        "smooth" in options,
        "lora" in options,
        "fp8" in options,
        "few-logits" in options,
        room,
        next((option for option in options if option in update_rules()), "adam"),
    )


CASES = (
    _case("tied", 4, tp=2),
    _case("untied", 2, "sp", tp=2),
    _case("tied", 2, "sp", "dropout", tp=2),
    _case("untied", 4, tp=4),
    _case("tied", 2, "sp", tp=4),
    _case("untied", 2, "sp", "dropout", tp=4),
    _case("tied", 2, pp=2),
    _case("untied", 1, "dropout", pp=2),
    _case("tied", 1, "dropout", pp=4),
    _case("untied", 2, pp=2, vpp=2),
    _case("tied", 2, "gpipe", pp=2),
    _case("tied", 2, "dropout", "looped-bfs", pp=2, vpp=2),
    _case("tied", 2, "dropout", "zero-bubble", pp=2),
    _case("tied", 1, "zb-v", pp=2, vpp=2),
    _case("untied", 1, "dropout", "zb-v", pp=2, vpp=2),
    _case("tied", 1, "dropout", "dualpipe-v", pp=2, vpp=2),
    _case("tied", 1, "dropout", pp=4, vpp=2),
    _case("untied", 2, "zero-bubble", pp=4),
    _case("tied", 1, "zb-v", pp=4, vpp=2),
    _case("untied", 1, "dualpipe-v", pp=4, vpp=2),
    _case("tied", 1, "gathered", "zb-v", pp=2, vpp=2, dp=2),
    _case("tied", 1, "dropout", "uniform", "zb-v", pp=2, vpp=2),
    _case("untied", 1, "dropout", "selective", "dualpipe-v", pp=2, vpp=2),
    _case("tied", 1, "dropout", "cut", "zero-bubble", tp=2, pp=2),
    _case("tied", 1, "sp", "dropout", "zero-bubble", tp=2, pp=2, vpp=2, dp=2),
    _case("tied", 1, "sp", "dropout", "zb-v", tp=2, pp=2, vpp=2, dp=2),
    _case("untied", 1, "sp", "dualpipe-v", tp=2, pp=2, vpp=2, dp=2),
    _case("tied", 2, "dropout", dp=2),
    _case("untied", 1, dp=4),
    _case("tied", 1, dp=8),
    _case("tied", 2, tp=2, pp=2),
    _case("untied", 2, "sp", "dropout", tp=2, dp=2),
    _case("tied", 2, "dropout", pp=2, dp=2),
    _case("tied", 1, "sp", "dropout", tp=2, pp=2, dp=2),
    _case("untied", 1, "sp", tp=2, pp=2, dp=2),
    _case("tied", 2, "sp", "dropout", tp=4, pp=2),
    _case("tied", 1, "dropout", tp=2, pp=4),
    _case("tied", 2, "sharded", "dropout", dp=2),
    _case("untied", 1, "gathered", dp=2),
    _case("tied", 2, "gathered", pp=2, dp=2),
    _case("tied", 1, "gathered", "sp", "dropout", tp=2, dp=4),
    _case("untied", 1, "sharded", "sp", tp=2, dp=4),
    _case("untied", 1, "gathered", pp=2, vpp=2, dp=2),
    _case("tied", 1, "gathered", "sp", tp=2, pp=2, dp=2),
    _case("tied", 2, "sp", "dropout", "selective", tp=2),
    _case("tied", 2, "dropout", "cut", tp=2),
    _case("untied", 2, "dropout", "block", pp=2),
    _case("untied", 2, "sp", "dropout", "host", tp=2),
    _case("tied", 1, "sp", "dropout", "uniform", tp=2, pp=2, dp=2),
    _case("tied", 1, "dropout", "selective", pp=2, vpp=2),
    _case("tied", 4, "dropout", cp=2),
    _case("untied", 2, "dropout", "a2a", cp=2),
    _case("untied", 2, "dropout", "documents", cp=2),
    _case("untied", 2, cp=4),
    _case("tied", 2, "dropout", "a2a", cp=4),
    _case("untied", 4, "dropout", "allgather", cp=4),
    _case("tied", 2, "dropout", "a2a+p2p", cp=4),
    _case("tied", 4, "documents", cp=4),
    _case("untied", 4, "dropout", "selective", cp=2),
    _case("tied", 2, "dropout", cp=8),
    _case("tied", 2, "sp", "dropout", tp=2, cp=2),
    _case("untied", 4, "sp", "a2a", tp=2, cp=2),
    _case("tied", 2, "dropout", cp=2, dp=2),
    _case("untied", 1, "sharded", "documents", cp=2, dp=2),
    _case("untied", 2, "dropout", cp=2, pp=2),
    _case("untied", 1, tp=2, cp=2, pp=2),
    _case("tied", 1, "sp", "dropout", "a2a", tp=2, cp=2, pp=2),
    _case("untied", 1, "gathered", "allgather", cp=2, pp=2, vpp=2, dp=2),
    _case("tied", 1, "dropout", cp=2, pp=2, dp=2),
    _case("untied", 1, "means", cp=2, pp=2, dp=2),
    _case("untied", 1, "dropout", cp=2, dp=2, room=6),
    _case("tied", 1, "dropout", "a2a", "sharded", cp=2, dp=2, room=4),
    _case("untied", 1, "sp", "dropout", tp=2, dp=2, room=8),
    _case("tied", 1, "sp", "dropout", "allgather", "selective", tp=2, cp=2, dp=2, room=4),
    _case("untied", 1, "gathered", cp=4, dp=2, room=2),
    _case("tied", 1, "fsdp", cp=2, dp=2, room=4),
    _case("moe", 2, dp=2, ep=2),
    _case("moe", 2, "alltoall", dp=2, ep=2),
    _case("moe", 4, tp=2),
    _case("moe", 2, "sp", "alltoall", tp=2, ep=2, etp=1),
    _case("moe-gated", 2, "alltoall", "dropout", dp=2, ep=2),
    _case("moe-gated", 2, "sp", tp=2),
    _case("moe", 1, "alltoall", dp=4, ep=2),
    _case("moe", 2, dp=4, ep=4),
    _case("moe-gated", 1, "alltoall", dp=4, ep=4),
    _case("moe", 2, "alltoall", pp=2, dp=2, ep=2),
    _case("moe-gated", 1, "dropout", pp=2, dp=2, ep=2),
    _case("moe", 2, "sp", "alltoall", tp=2, dp=2, ep=2),
    _case("moe", 2, "sp", "alltoall", "dropout", tp=2, dp=2, ep=2, etp=1),
    _case("moe", 2, "sp", tp=2, dp=2, ep=4, etp=1),
    _case("moe", 2, tp=2, dp=2, ep=2, etp=2),
    _case("moe-gated", 2, "alltoall", dp=2, ep=1, etp=2),
    _case("moe", 1, "sp", "alltoall", "dropout", tp=2, pp=2, dp=2, ep=2),
    _case("moe-gated", 1, "sp", "alltoall", tp=2, pp=2, vpp=2, dp=2, ep=4, etp=1),
    _case("moe", 2, "alltoall", "gathered", dp=4, ep=2),
    _case("moe", 2, "sp", "sharded", tp=2, dp=2, ep=2, etp=1),
    _case("moe", 2, "alltoall", "dropout", "selective", dp=2, ep=2),
    _case("moe-gated", 2, "sp", "uniform", tp=2, dp=2, ep=2),
    _case("moe", 1, "alltoall", "dropout", "combined-1f1b", dp=2, ep=2),
    _case("moe-gated", 1, "alltoall", "combined-1f1b", pp=2, dp=2, ep=2),
    _case("moe", 1, "sp", "alltoall", "dropout", "combined-1f1b", tp=2, dp=2, ep=2, etp=1),
    _case("moe", 1, "alltoall", "dropout", "combined-1f1b", pp=2, vpp=2, dp=2, ep=2),
    _case("moe", 1, "alltoall", "dropout", "selective", "combined-1f1b", pp=2, dp=2, ep=2),
    _case("moe-gated", 1, "alltoall", "dropout", "uniform", "combined-1f1b", dp=4, ep=4),
    _case("moe", 1, "alltoall", "combined-1f1b", pp=4, dp=2, ep=2),
    _case("moe", 1, "sp", "alltoall", "combined-1f1b", "gathered", tp=2, pp=2, dp=2, ep=2),
    _case("biased", 2, tp=2, pp=2),
    _case("biased", 2, "sp", "alltoall", tp=2, ep=2, etp=1),
    _case("biased", 2, "alltoall", dp=2, ep=2),
    _case("biased", 2, "alltoall", "dropout", "selective", dp=2, ep=2),
    _case("biased", 1, "sp", "alltoall", "sharded", tp=2, pp=2, dp=2, ep=2),
    _case("dropping", 2, "alltoall", dp=2, ep=2),
    _case("dropping", 2, "sp", "alltoall", tp=2, cp=2, ep=2, etp=1),
    _case("dropping", 1, "alltoall", "dropout", "selective", tp=2, pp=2, dp=2, ep=2),
    _case("earliest", 2, tp=2, dp=2, ep=2),
    _case("earliest", 2, "alltoall", "dropout", cp=2, dp=2, ep=4),
    _case("earliest", 2, "sp", "alltoall", tp=4, ep=2, etp=1),
    _case("moe", 1, "alltoall", "dropout", "zero-bubble", pp=2, dp=2, ep=2),
    _case("moe-gated", 1, "sp", "alltoall", "dualpipe-v", tp=2, pp=2, vpp=2, ep=2, etp=1),
    _case("biased", 1, "alltoall", "dropout", "selective", "zb-v", pp=2, vpp=2, dp=2, ep=2),
    _case("moe", 2, "alltoall", "fsdp", dp=2, ep=2),
    _case("moe", 2, "alltoall", "fsdp", "dropout", dp=4, ep=2),
    _case("moe-gated", 1, "sp", "alltoall", "fsdp", tp=2, dp=2, ep=2, etp=1),
    _case("biased", 2, "fsdp", tp=2, dp=2),
    _case("moe", 1, "fsdp", "dropout", "selective", tp=2, pp=2, dp=2, ep=2),
    _case("moe", 1, "fsdp", dp=4, ep=2, dp_outer=2),
    _case("moe-gated", 2, "alltoall", cp=2, ep=2),
    _case("moe-gated", 2, "sp", "alltoall", "dropout", tp=2, cp=2, ep=2, etp=1),
    _case("moe-gated", 1, "alltoall", "gathered", cp=2, dp=2, ep=4),
    _case("moe-gated", 1, "fsdp", "dropout", cp=2, pp=2, dp=2, ep=2),
    _case("grouped", 2, "alltoall", dp=2, ep=2),
    _case("grouped", 2, tp=2),
    _case("grouped", 2, "sp", "alltoall", tp=2, ep=2, etp=1),
    _case("grouped", 2, "sp", "alltoall", "selective", tp=2, dp=2, ep=2),
    _case("sinkhorn", 2, "sp", tp=2, dp=2, ep=2),
    _case("step-loss", 2, "sp", "uniform", tp=2, pp=2),
    _case("choosing", 2, "sp", "alltoall", "dropout", tp=2, ep=2, etp=1),
    _case("choosing", 2, "alltoall", "dropout", "selective", cp=2, dp=2, ep=2),
    _case("choosing", 1, "dropout", tp=2, pp=2),
    _case("forced", 2, "sp", "alltoall", tp=2, ep=2, etp=1),
    _case("forced", 2, "dropout", tp=2, pp=2),
    _case("thirds", 2, tp=3),
    _case("thirds", 2, "alltoall", "dropout", "selective", tp=3, ep=3, etp=1),
    _case("thirds", 1, "alltoall", "zero-bubble", tp=3, pp=2, ep=3, etp=1),
    _case("tied", 2, "sharded", "dropout", dp=4, dp_outer=2),
    _case("untied", 2, dp=4, dp_outer=2),
    _case("tied", 2, "fsdp", "dropout", dp=2),
    _case("untied", 1, "fsdp", dp=4),
    _case("untied", 1, "fsdp", "sp", tp=2, dp=2),
    _case("tied", 2, "fsdp", pp=2, dp=2),
    _case("untied", 1, "fsdp", "dropout", pp=2, vpp=2, dp=2),
    _case("tied", 1, "fsdp", "sp", "dropout", tp=2, pp=2, dp=2),
    _case("tied", 2, "fsdp", dp=4, dp_outer=2),
    _case("few", 2, "dropout", tp=4),
    _case("untied", 4, "smooth", tp=2),
    _case("tied", 2, "sp", "smooth", tp=4, pp=2),
    _case("few", 1, "sp", "sharded", tp=4, dp=2),
    _case("few", 2, "dropout", cp=2),
    _case("few", 4, "allgather", cp=4),
    _case("few", 2, "sp", "a2a", tp=2, cp=2),
    _case("few", 2, "dropout", "a2a+p2p", cp=4),
    _case("untied", 2, "sp", "slices", "dropout", tp=2),
    _case("tied", 1, "sp", "slices", "uniform", tp=4, pp=2),
    _case("tied", 2, "few-logits", "sp", "zero-bubble", tp=2, pp=2),
    _case("untied", 4, "few-logits", "smooth", "dropout", tp=2),
    _case("untied", 1, "few-logits", "sp", "gathered", tp=2, dp=2),
    _case("untied", 2, "lora", "sp", tp=2, pp=2),
    _case("tied", 1, "lora", "dropout", "zero-bubble", tp=2, pp=2),
    _case("moe", 2, "lora", "sp", "alltoall", tp=2, ep=2, etp=1),
    _case("moe", 2, "lora", tp=2, dp=2, ep=2, etp=2),
    _case("moe-gated", 1, "lora", "sp", "alltoall", "sharded", tp=2, dp=2, ep=2),
    _case("tied", 2, "sgd", "sharded", "dropout", dp=2),
    _case("moe", 1, "sgd", "sp", "fsdp", tp=2, dp=2, ep=2, etp=1),
    _case("untied", 2, "lion", "sharded", dp=2),
    _case("untied", 2, "lion", "sp", "dropout", tp=2, pp=2),
    _case("untied", 1, "lion", "fsdp", dp=4),
    _case("tied", 2, "adafactor", "sharded", "dropout", dp=2),
    _case("untied", 2, "adafactor", "sp", "sharded", tp=2, dp=2),
    _case("tied", 2, "adafactor", pp=2, dp=2),
    _case("moe-gated", 1, "adafactor", "fsdp", "sp", tp=2, dp=2, ep=2, etp=1),
    _case("moe", 1, "adafactor", "sharded", "alltoall", dp=4, ep=2),
    _case("untied", 2, "muon", "sp", "sharded", tp=2, dp=2),
    _case("tied", 2, "muon", "sharded", "dropout", dp=4),
    _case("untied", 1, "muon", "fsdp", dp=4),
    _case("tied", 2, "muon", "fsdp", "sp", tp=2, dp=2),
    _case("moe-gated", 1, "muon", "sp", "sharded", tp=2, dp=2, ep=2, etp=1),
    _case("moe", 2, "muon", "alltoall", tp=2, ep=2, etp=2, dp=2),
    _case("moe-gated", 1, "muon", "fsdp", "alltoall", dp=4, ep=2),
    _case("latent", 2, "muon", "sp", "dropout", tp=2, pp=2),
    _case("scaled", 2, "sp", "dropout", "selective", tp=2),
    _case("scaled", 2, "few-logits", tp=2, pp=2),
    _case("scaled", 1, "fsdp", "uniform", cp=2, dp=2),
    _case("parallel", 2, "sp", "dropout", "selective", tp=2),
    _case("parallel", 1, "dropout", "zero-bubble", pp=2, dp=2),
    _case("few", 2, "lora", "dropout", tp=4),
    _case("latent", 2, "sp", "lora", tp=2),
    _case("gated", 2, "sp", "dropout", tp=2),
    _case("gated", 2, "selective", tp=4),
    _case("gated", 2, "dropout", cp=2),
    _case("gated", 2, "sp", "a2a", tp=2, cp=2),
    _case("gated", 2, "dropout", "zero-bubble", pp=2),
    _case("unrotated", 2, "sp", tp=2),
    _case("unrotated", 2, "dropout", cp=2),
    _case("unrotated", 2, "dropout", "selective", pp=2),
    _case("latent", 4, tp=2),
    _case("latent", 2, "sp", "dropout", tp=2),
    _case("latent", 2, "dropout", "selective", pp=2),
    _case("latent", 2, "dropout", cp=2),
    _case("latent", 2, "sp", "a2a", tp=2, cp=2),
    _case("latent", 2, "sp", "dropout", "selective", tp=2, cp=2),
    _case("latent", 2, "dropout", "a2a+p2p", cp=4),
    _case("latent", 1, "sp", "dropout", "zero-bubble", tp=2, pp=2, dp=2),
    _case("latent", 1, "sp", "fsdp", tp=2, dp=2),
    _case("untied", 2, "lora", "sp", "slices", "dropout", tp=2),
    _case("tied", 1, "lora", "sp", "uniform", "gathered", tp=2, pp=2, dp=2),
    _case("untied", 2, "lora", "selective", "dropout", dp=2),
    _case("tied", 1, "lora", pp=4, vpp=2),
    _case("tied", 1, "lora", "zb-v", pp=4, vpp=2),
    _case("untied", 1, "lora", "dropout", cp=2, dp=2),
    _case("moe", 1, "lora", "alltoall", "combined-1f1b", pp=2, dp=2, ep=2),
    _case("mtp", 4, "dropout", tp=2),
    _case("mtp", 2, "sp", "dropout", tp=2),
    _case("mtp", 2, "dropout", pp=2),
    _case("mtp", 2, "dropout", cp=2),
    _case("mtp", 2, "documents", "dropout", cp=4),
    _case("mtp", 1, "dropout", "zb-v", pp=2, vpp=2),
    _case("mtp", 2, "zero-bubble", "few-logits", "sp", tp=2, pp=2),
    _case("mtp", 1, "gathered", "sp", "smooth", tp=2, pp=2, dp=2),
    _case("mtp", 1, "fsdp", "dropout", pp=2, dp=2),
    _case("mtp", 1, "dropout", "uniform", pp=2, vpp=2),
    _case("mtp", 2, "cut", tp=2, pp=2),
    _case("mtp", 1, "dropout", cp=2, dp=2, room=6),
    _case("mtp", 1, "sp", "lora", tp=2, pp=2),
    _case("sinusoidal", 1, "sp", tp=2, cp=2),
    _case("axes", 2, "sp", tp=2),
    _case("axes", 2, "dropout", pp=2),
    _case("axes", 2, "dropout", cp=2),
    _case("axes", 1, "dropout", "selective", cp=2, dp=2, room=6),
    _case("bert", 4, "dropout", tp=2),
    _case("bert", 2, "sp", tp=2),
    _case("bert", 2, "sp", "dropout", "selective", tp=4),
    _case("bert", 2, "dropout", pp=2),
    _case("bert", 1, "zb-v", pp=2, vpp=2),
    _case("bert", 2, "dropout", cp=2),
    _case("bert", 2, "a2a", cp=4),
    _case("bert", 1, "sp", "few-logits", "zero-bubble", "sharded", tp=2, pp=2, dp=2),
    _case("bert", 1, "fsdp", "dropout", pp=2, dp=2),
    _case("bert", 1, "sp", "uniform", tp=2, cp=2, pp=2),
    _case("bert-post", 2, "sp", "dropout", tp=2),
    _case("bert-post", 1, "sp", "dropout", tp=2, cp=2),
    _case("bert-post", 1, "dropout", pp=2, dp=2),
    _case("mamba", 2, "sp", "dropout", tp=2),
    _case("mamba", 2, "dropout", pp=2),
    _case("mamba", 4, tp=4),
    _case("mamba", 4, cp=2),
    _case("mamba", 2, "documents", cp=4),
    _case("mamba", 1, "sp", tp=2, cp=2, pp=2),
    _case("mamba", 2, "uniform", "zero-bubble", tp=2, pp=2),
    _case("mamba", 1, "fsdp", "sp", tp=2, dp=2),
    _case("mamba", 2, "lora", "sp", tp=2, pp=2),
    _case("hybrid", 2, "sp", "alltoall", "dropout", "selective", tp=2, ep=2, etp=1),
    _case("hybrid", 2, "alltoall", "dropout", cp=2, ep=2),
    _case("hybrid", 1, "sp", "gathered", tp=2, pp=2, dp=2, ep=2),
    _case("mixed", 4, tp=2),
    _case("mixed", 2, "sp", "dropout", tp=2),
    _case("mixed", 2, "dropout", "selective", pp=2),
    _case("mixed", 2, "a2a", "dropout", cp=2),
    _case("mixed", 2, "sp", "alltoall", tp=2, ep=2, etp=1),
    _case("mixed", 1, "fsdp", "alltoall", dp=2, ep=2),
    _case("mixed", 1, "dropout", "uniform", pp=4),
    _case("mixed", 2, "sp", "zero-bubble", tp=2, pp=2),
    _case("mup", 2, tp=2, pp=2),
    _case("mup", 1, "sp", "dropout", "sharded", tp=2, pp=2, dp=2),
    _case("mup", 2, "fsdp", "alltoall", dp=2, ep=2),
    _case("sparse", 4, tp=2),
    _case("sparse", 2, "sp", "dropout", tp=2),
    _case("sparse", 2, "sp", "selective", tp=4),
    _case("sparse", 2, "dropout", "uniform", pp=2),
    _case("sparse", 1, "sp", "zero-bubble", "sharded", tp=2, pp=2, dp=2),
    _case("sparse", 1, "fsdp", tp=2, dp=2),
    _case("delta", 4, tp=2),
    _case("delta", 2, "sp", "dropout", tp=2),
    _case("delta", 2, "sp", "selective", tp=4),
    _case("delta", 2, "dropout", pp=2),
    _case("delta", 1, "dropout", "uniform", pp=4),
    _case("delta", 1, "sp", "zero-bubble", "sharded", tp=2, pp=2, dp=2),
    _case("delta", 1, "fsdp", "dropout", tp=2, dp=2),
    _case("moe-mtp", 2, "sp", "alltoall", tp=2, ep=2, etp=1),
    _case("moe-mtp", 2, "alltoall", "dropout", pp=2, dp=2, ep=2),
    _case("moe-mtp", 1, "alltoall", "combined-1f1b", pp=2, dp=2, ep=2),
    _case("moe-mtp", 2, "dropout", "selective", cp=2),
    _case("moe-mtp", 1, "zero-bubble", "dropout", pp=2, dp=2, ep=2),
    _case("moe-mtp", 1, "sp", "alltoall", "sharded", tp=2, pp=4, ep=2, etp=1),
    _case("t5", 2, "sp", "dropout", tp=2),
    _case("t5", 4, "sp", "selective", tp=4),
    _case("t5", 2, "dropout", pp=2),
    _case("t5", 1, "dropout", pp=4),
    _case("t5", 2, "sharded", dp=2),
    _case("t5", 1, "sp", "uniform", tp=2, pp=2),
    _case("t5", 1, "sp", "gathered", "dropout", tp=2, pp=2, dp=2),
    _case("t5", 1, "fsdp", "dropout", tp=2, dp=2),
    _case("t5-learned", 4, tp=2),
    _case("t5-learned", 1, pp=2, vpp=2),
    _case("t5-learned", 1, "sp", "few-logits", "dropout", tp=2, pp=2),
    _case("t5-learned", 2, "zero-bubble", pp=2),
    _case("t5-learned", 1, "fsdp", pp=2, dp=2),
    _case("untied", 2, "fp8", "sp", "dropout", tp=2),
    _case("untied", 2, "fp8", "sp", "slices", tp=2),
    _case("tied", 1, "fp8", "sharded", dp=2, tp=2),
    _case("tied", 1, "fp8", "zero-bubble", "dropout", tp=2, pp=2),
    _case("untied", 1, "fp8", "fsdp", "uniform", dp=2),
    _case("untied", 2, "fp8", "dropout", cp=2),
    _case("latent", 2, "fp8", "sp", tp=2),
    _case("untied", 2, "fp8", "sp", "gathered", tp=2, dp=2),
    _case("moe", 2, "fp8", dp=2, ep=2),
    _case("moe-gated", 2, "fp8", "sp", "alltoall", tp=2, ep=2, etp=1),
)
"""Layouts of 2, 4 and 8 ranks, and of 3 and 6, which do not divide the tokens of a micro-batch.

The second argument is the number of samples in a micro-batch.
"""
