"""The entry in the group ``megatron.tasks``; it needs megatron-train, which the model does not."""

from megatron_train import TaskKind

TASK = TaskKind(
    name="masked_lm",
    summary="predict hidden tokens",
    task="bidirectional.task:MaskedLM",
    data="bidirectional.data:MaskedText",
)
