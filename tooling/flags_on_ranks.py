"""Runs of several ranks in which flags take effect that are refused on one rank.

`integration_tests/test_flags_on_ranks.py` tries each of them. test_flags_have_effect.py tries all
other flags on one rank.
"""

from typing import NamedTuple

Words = dict[str, str | None]
"""Flags and their values; an empty value is a switch, None takes a flag of the base away."""


class SetUp(NamedTuple):
    """A run that shows a flag's effect: ranks, flags on top of `BASE`, and the flags under test."""

    ranks: int
    context: Words
    change: Words


BASE: Words = {
    "--num-layers": "4",
    "--hidden-size": "16",
    "--num-attention-heads": "4",
    "--seq-length": "16",
    "--micro-batch-size": "1",
    "--global-batch-size": "4",
    "--train-iters": "1",
    "--train-data-path": "text",
    "--tokenizer-model": "bytes",
    "--eval-iters": "0",
    "--log-interval": "1",
    "--lr": "1e-2",
    "--hidden-dropout": "0",
    "--attention-dropout": "0",
    "--device": "cpu",
    "--no-progress": "",
}
TP2: Words = {"--tensor-model-parallel-size": "2"}
SP2: Words = {**TP2, "--sequence-parallel": ""}
PP2: Words = {"--pipeline-model-parallel-size": "2"}
CP2: Words = {"--context-parallel-size": "2"}
EXPERTS: Words = {"--num-experts": "4"}
EP2: Words = {
    **EXPERTS,
    "--expert-model-parallel-size": "2",
    "--moe-token-dispatcher-type": "alltoall",
}
SHARDED: Words = {"--use-distributed-optimizer": ""}
FSDP: Words = {"--use-torch-fsdp2": ""}
MUON: Words = {"--optimizer": "muon"}
FULL: Words = {
    "--recompute-granularity": "full",
    "--recompute-method": "uniform",
    "--recompute-num-layers": "1",
}
UNEVEN: Words = {**PP2, "--num-layers": "3"}
"""Refused by itself: three layers on two stages."""

LAYERS_PER_VIRTUAL_STAGE = "--num-layers-per-virtual-pipeline-stage"

ON_RANKS: dict[str, SetUp] = {
    "data.broadcast_batches": SetUp(2, TP2, {"--broadcast-batches": ""}),
    "placement.sequence_parallel": SetUp(2, TP2, {"--sequence-parallel": ""}),
    "placement.cp_comm_type": SetUp(2, CP2, {"--cp-comm-type": "a2a"}),
    "placement.context_parallel_split": SetUp(
        2,
        {**CP2, "--reset-attention-mask": ""},
        {"--context-parallel-split": "per_document"},
    ),
    "placement.tp_comm_overlap": SetUp(2, SP2, {"--tp-comm-overlap": ""}),
    "layout.tp": SetUp(2, {}, TP2),
    "layout.cp": SetUp(2, {}, CP2),
    "layout.ep": SetUp(2, EXPERTS, {"--expert-model-parallel-size": "2"}),
    "layout.pp": SetUp(2, {}, PP2),
    "layout.vpp": SetUp(2, PP2, {"--num-virtual-stages-per-pipeline-rank": "2"}),
    "layout.etp": SetUp(2, {**SP2, **EXPERTS}, {"--expert-tensor-parallel-size": "1"}),
    "layout.hierarchical_cp": SetUp(
        4,
        {"--context-parallel-size": "4"},
        {"--hierarchical-context-parallel-sizes": "2 2", "--cp-comm-type": "a2a+p2p"},
    ),
    "layout.dp_outer": SetUp(4, SHARDED, {"--num-distributed-optimizer-instances": "2"}),
    "pipeline.schedule": SetUp(2, PP2, {"--pipeline-schedule": "gpipe"}),
    "pipeline.group_size": SetUp(
        2,
        {**PP2, "--num-virtual-stages-per-pipeline-rank": "2", "--global-batch-size": "6"},
        {"--microbatch-group-size-per-virtual-pipeline-stage": "3"},
    ),
    "pipeline.first": SetUp(2, PP2, {"--decoder-first-pipeline-num-layers": "1"}),
    "pipeline.last": SetUp(2, PP2, {"--decoder-last-pipeline-num-layers": "1"}),
    "pipeline.count_embedding": SetUp(2, UNEVEN, {"--account-for-embedding-in-pipeline-split": ""}),
    "pipeline.count_loss": SetUp(2, UNEVEN, {"--account-for-loss-in-pipeline-split": ""}),
    "pipeline.overlap_experts": SetUp(2, EP2, {"--overlap-moe-expert-parallel-comm": ""}),
    "pipeline.stages": SetUp(2, PP2, {"--pipeline-model-parallel-layout": "Et|tttL"}),
    "data_parallel.use_torch_fsdp2": SetUp(2, {}, FSDP),
    "data_parallel.torch_fsdp2_no_reshard_after_forward": SetUp(
        2, FSDP, {"--torch-fsdp2-no-reshard-after-forward": ""}
    ),
    "muon.tp_mode": SetUp(2, {**TP2, **MUON}, {"--muon-tp-mode": "blockwise"}),
    "recompute.distribute_saved_activations": SetUp(
        2, {**TP2, **FULL}, {"--distribute-saved-activations": ""}
    ),
    LAYERS_PER_VIRTUAL_STAGE: SetUp(2, PP2, {LAYERS_PER_VIRTUAL_STAGE: "1"}),
}
"""By option, or by the spelling of an alias."""


def command(words: Words) -> list[str]:
    """Returns the command line of a run with these words."""
    parts = (f"{flag} {value}" for flag, value in words.items() if value is not None)
    return ["pretrain", "gpt", *" ".join(parts).split()]
