"""The entry of left-to-right language modelling in the group ``megatron.tasks``."""

from megatron_train.tasks.kinds import TaskKind

TASK = TaskKind(
    name="gpt",
    summary="predict each next token",
    task="megatron_train.tasks.gpt:gpt_task",
    data="megatron_train.tasks.gpt_data:GPTData",
)
