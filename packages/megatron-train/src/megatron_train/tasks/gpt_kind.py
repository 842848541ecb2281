"""The entry of causal language modelling in the entry-point group ``megatron.tasks``."""

from dataclasses import fields

from megatron_data.datasets import FIMConfig
from megatron_parallel.extensions import Section

from megatron_train.config.data import DataConfig
from megatron_train.tasks.gpt_checks import check_fim, check_logits
from megatron_train.tasks.kinds import TaskKind

TASK = TaskKind(
    name="gpt",
    summary="predict each next token",
    task="megatron_train.tasks.gpt:gpt_task",
    data="megatron_train.tasks.gpt_data:GPTData",
    proof_data="megatron_train.prove.samples:CausalProof",
    model_kinds=("gpt", "hybrid", "mamba"),
    sections=(Section("fim", FIMConfig, "filling in the middle"),),
    supported_settings=tuple(
        f"data.{f.name}" for f in fields(DataConfig) if f.metadata.get("read_by") == "task"
    ),
    checks=(check_logits, check_fim),
)
