"""The entry in the group ``megatron.tasks``. Unlike the model, it needs megatron-train."""

from megatron_parallel.extensions import Section
from megatron_train import TaskKind

from bidirectional.settings import MaskedLMConfig, check_masked_lm

TASK = TaskKind(
    name="masked_lm",
    summary="predict masked tokens",
    task="bidirectional.task:MaskedLM",
    data="bidirectional.data:MaskedText",
    proof_data="megatron_train.prove.samples:BidirectionalProof",
    model_kinds=("bidirectional",),
    sections=(Section("masked_lm", MaskedLMConfig, "masked tokens"),),
    checks=(check_masked_lm,),
)
