"""A case of the proof: a layout, and the model and batches that it trains."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from megatron_models import ModelConfig
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


def case_of(
    model: Model,
    micro_batch: int = 1,
    *options: str,
    room: int | None = None,
    **degrees: int,
) -> Case:
    """Returns a case from the words in its name.

    Args:
        model: One of `MODELS`.
        micro_batch: Number of samples in a micro-batch.
        *options: Words of `DATA_PARALLEL` and `RECOMPUTE`, names of schedules and update rules, and
            the words of other options.
        room: Tokens that a rank of a pool may hold at a time.
        **degrees: Degrees of the layout that are not 1.
    """
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
