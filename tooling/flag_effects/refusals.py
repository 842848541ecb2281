"""Flags whose effect on one rank is an error."""

import torch

REFUSALS = {
    # Text has equal positions on all axes, so that all sections give the same model.
    "model.mrope_section": "--mrope-section must be 3 numbers of at least 0 that sum to 4",
    "model.mrope_interleaved": "--mrope-interleaved allows at most 1 for the height",
    "model.task_head": "the task gpt predicts tokens",
    "model.num_labels": "--num-labels 3 does not fit --task-head none",
    "model.head_pooling": "--head-pooling mean has no effect without --task-head",
    "model.normalize_embedding": "--no-normalize-embedding has an effect only with --task-head",
    "model.moe_expert_rank_capacity_factor": "step 1: layer 0: 64 selections without room, raise",
    "training.cuda_graph_impl": "--cuda-graph-impl local does not work with --device cpu",
    "training.cuda_graph_warmup_steps": "has no effect without --cuda-graph-impl local; give both",
    "training.task": "--task gtp: no kind of task 'gtp'; did you mean 'gpt'?",
    "offload.optimizer_offload_fraction": "has no effect without --optimizer-cpu-offload; give",
    "offload.overlap_cpu_optimizer_d2h_h2d": "has no effect without --optimizer-cpu-offload; give",
    "checkpoint.exit_on_missing_checkpoint": "--load nowhere has no complete checkpoint",
    "data.max_document_bytes": "lines.jsonl:1: ",
    "data.max_template_steps": "it exceeds the limit of steps (--max-template-steps",
    "data.max_template_characters": "it makes a text of more than 3 characters",
}
"""Flags whose effect is an error, with a part of its message."""
ALIAS_REFUSALS: dict[str, str] = {}
"""The same for flags that set other options."""
if not torch.cuda.is_available():
    REFUSALS["placement.transformer_impl"] = "linear cannot use backend transformer_engine: needs"
    REFUSALS["placement.flash_attention_version"] = "cannot use backend flash_attn_3: needs a CUDA"
    ALIAS_REFUSALS["--use-flash-attn"] = "attention cannot use backend flash_attn: needs a CUDA"
    REFUSALS["training.device"] = "--device cuda: torch finds no GPU"
    REFUSALS["offload.optimizer_cpu_offload"] = "has no effect: the device is a CPU"
    REFUSALS["adam.kernels"] = "--adam-kernels is apex, which runs on CUDA devices, but parameter"
