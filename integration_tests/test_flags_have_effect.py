"""Every accepted flag has an effect on a run.

Each option is added to a small run (`BASE`) with the context that it needs, and the observable
results of both runs are compared: exit status, losses, gradient norms and learning rates of every
step, evaluations, output, files, and some calls that have no other visible effect on one rank
(`Probes`). Copies of the configuration are ignored: the printed settings, the line on the model,
`config.yaml`.

A run with the flag must succeed. Only for the flags in `REFUSALS` is an error the expected effect.
test_flags_on_ranks.py covers the flags that one rank refuses. `nox -s tests` tries one flag in
three.
"""

import json
import re
import shutil
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import megatron_parallel.recompute.checkpointing as checkpointing
import pytest
import torch
from flags_on_ranks import LAYERS_PER_VIRTUAL_STAGE, ON_RANKS, Words, command
from megatron_ckpt import Checkpoint
from megatron_data import ByteTokenizer, IndexedDatasetBuilder, preprocess, train_bpe
from megatron_data.indexed.dataset_files import FileTokens
from megatron_data.tokenizers import NullTokenizer
from megatron_parallel import GradientBuffers, Mesh
from megatron_parallel.pipeline import gradients
from megatron_parallel.recompute import OffloadSavedTensors
from megatron_train import StepEngine, Trainer, batches, tokenizer
from megatron_train.cli import main
from megatron_train.config.aliases import ALIASES
from megatron_train.config.extensions import SelectedExtensions
from megatron_train.config.reference import documented_options
from megatron_train.config.run_sections import run_options
from megatron_train.metrics.console import Console

BASE: Words = {
    "--num-layers": "2",
    "--hidden-size": "16",
    "--num-attention-heads": "2",
    "--seq-length": "16",
    "--micro-batch-size": "2",
    "--global-batch-size": "4",
    "--train-iters": "4",
    "--data-path": "text",
    "--tokenizer-model": "bytes",
    "--split": "6,3,1",
    "--eval-iters": "1",
    "--log-interval": "2",
    "--lr": "1e-2",
    "--hidden-dropout": "0",
    "--attention-dropout": "0",
    "--device": "cpu",
    "--save": "out",
}
ROPE: Words = {"--position-embedding-type": "rope"}
LINEAR = {"--experimental-attention-variant": "gated_delta_net", "--linear-attention-freq": "2"}
LATENT = ROPE | {
    "--multi-latent-attention": "",
    "--normalization": "RMSNorm",
    "--kv-lora-rank": "8",
    "--qk-head-dim": "8",
    "--qk-pos-emb-head-dim": "4",
    "--v-head-dim": "8",
}
SPARSE = LATENT | {
    "--experimental-attention-variant": "dsa",
    "--dsa-indexer-n-heads": "2",
    "--dsa-indexer-head-dim": "8",
    "--dsa-indexer-topk": "2",
}
TEMPERATURE: Words = {**ROPE, "--no-rope-freq": "2", "--attn-temperature-scale": "5"}
EXPERTS: Words = {"--num-experts": "4"}
PRE_SOFTMAX: Words = {**EXPERTS, "--moe-router-pre-softmax": ""}
GROUPS: Words = {"--moe-router-num-groups": "2", "--moe-router-group-topk": "1"}
SIGMOID: Words = {**EXPERTS, "--moe-router-score-function": "sigmoid"}
LLAMA3: Words = {**ROPE, "--rope-scaling-type": "llama3", "--rope-scaling-original-length": "8"}
YARN: Words = {**ROPE, "--rope-scaling-type": "yarn", "--rope-scaling-original-length": "64"}
LONGROPE: Words = {
    **ROPE,
    "--rope-scaling-type": "longrope",
    "--rope-scaling-short-factors": "1,2,3,4",
    "--rope-scaling-long-factors": "5,6,7,8",
}
CLIPPED: Words = {"--qk-clip": "", "--qk-clip-threshold": "1e-6"}
WSD: Words = {"--lr-decay-style": "WSD", "--lr-wsd-decay-iters": "2"}
GROWING: Words = {
    "--start-weight-decay": "0",
    "--end-weight-decay": "5",
    "--weight-decay-incr-style": "linear",
}
ADAFACTOR: Words = {"--optimizer": "adafactor"}
MUON: Words = {"--optimizer": "muon"}
MUP: Words = {"--use-mup": ""}
AWARE: Words = {"--use-precision-aware-optimizer": ""}
SCALED: Words = {"--fp16": ""}
LORA: Words = {"--linear-product": "lora"}
SAMPLES: Words = {"--train-iters": None, "--train-samples": "16"}
BY_SPLIT: Words = {
    "--data-path": None,
    "--split": None,
    "--train-data-path": "text",
    "--valid-data-path": "text",
}
GPT2: Words = {"--tokenizer-model": None, "--vocab-file": "vocab", "--merge-file": "merges"}
BERT: Words = {
    "--tokenizer-model": None,
    "--tokenizer-type": "BertWordPieceCase",
    "--vocab-file": "words",
}
TIKTOKEN: Words = {"--tokenizer-model": "ranks", "--tokenizer-type": "TikTokenizer"}
SHARDED: Words = {"--use-distributed-optimizer": ""}
SELECTIVE: Words = {"--recompute-granularity": "selective"}
FULL: Words = {
    "--recompute-granularity": "full",
    "--recompute-method": "uniform",
    "--recompute-num-layers": "1",
}
TALKS: Words = {"--data-path": "talks", "--reset-position-ids": "", "--reset-attention-mask": ""}
LINES: Words = {
    **TALKS,
    "--sft": "",
    "--data-path": "lines.jsonl",
    "--tokenizer-model": "chat",
    "--seq-length": "96",
}
CHAT: Words = {**LINES, "--tokenizer-type": "SFTTokenizer"}
IMAGES: Words = {**LINES, "--tokenizer-prompt-format": "qwen2p0"}
FIM: Words = {
    "--fim-data": "",
    "--fim-prefix-token": "a",
    "--fim-middle-token": "b",
    "--fim-suffix-token": "c",
}
FILES: Words = {**FIM, "--fim-split-sample": "#"}
COMPAT: Words = {"--sample-order": "compat"}
ROOM = "--max-seqlen-per-dp-cp-rank"
POOL: Words = {
    "--reset-attention-mask": "",
    "--micro-batch-size": "1",
    "--hybrid-context-parallel": "",
    ROOM: "16",
}
LOAD: Words = {"--load": "trained", "--train-iters": "6", "--lr-decay-iters": "8"}

# Option: the context that it needs in addition to the base, and the flags that are then added.
FP8 = {"--fp8-format": "hybrid"}
ENDS = {**FP8, "--num-layers": "3", "--first-last-layers-bf16": ""}
EFFECTS: dict[str, tuple[Words, Words]] = {
    "model.num_layers": ({}, {"--num-layers": "1"}),
    "model.hidden_size": ({}, {"--hidden-size": "32"}),
    "model.num_attention_heads": ({}, {"--num-attention-heads": "4"}),
    "model.vocab_size": ({}, {"--vocab-size": "300"}),
    "model.max_position_embeddings": ({}, {"--max-position-embeddings": "32"}),
    "model.num_query_groups": ({}, {"--num-query-groups": "1"}),
    "model.kv_channels": ({}, {"--kv-channels": "4"}),
    "model.ffn_hidden_size": ({}, {"--ffn-hidden-size": "24"}),
    "model.make_vocab_size_divisible_by": ({}, {"--make-vocab-size-divisible-by": "512"}),
    "model.position_embedding_type": ({}, ROPE),
    "model.rotary_base": (ROPE, {"--rotary-base": "10"}),
    "model.rotary_base_local": (
        ROPE | {"--sliding-window": "4"},
        {"--rotary-base-local": "10"},
    ),
    "model.rotary_percent": (ROPE, {"--rotary-percent": "0.5"}),
    "model.rotary_interleaved": (ROPE, {"--rotary-interleaved": ""}),
    "model.rope_scaling_type": (ROPE, {"--rope-scaling-type": "linear"}),
    "model.rope_scaling_factor": (LLAMA3, {"--rope-scaling-factor": "2"}),
    "model.rope_scaling_low_freq_factor": (LLAMA3, {"--rope-scaling-low-freq-factor": "0.1"}),
    "model.rope_scaling_high_freq_factor": (LLAMA3, {"--rope-scaling-high-freq-factor": "9"}),
    "model.rope_scaling_original_length": (LLAMA3, {"--rope-scaling-original-length": "64"}),
    "model.rope_scaling_attention_factor": (YARN, {"--rope-scaling-attention-factor": "3"}),
    "model.rope_scaling_short_factors": (LONGROPE, {"--rope-scaling-short-factors": "9,9,9,9"}),
    "model.rope_scaling_long_factors": (
        LONGROPE | {"--rope-scaling-original-length": "4"},
        {"--rope-scaling-long-factors": "9,9,9,9"},
    ),
    "model.yarn_beta_fast": (
        YARN | {"--no-yarn-correction-range-round-to-int": ""},
        {"--yarn-beta-fast": "4"},
    ),
    "model.yarn_beta_slow": (YARN, {"--yarn-beta-slow": "0.01"}),
    "model.yarn_correction_range_round_to_int": (
        YARN,
        {"--no-yarn-correction-range-round-to-int": ""},
    ),
    "model.mscale": (YARN, {"--mscale": "3"}),
    "model.mscale_all_dim": (YARN, {"--mscale-all-dim": "2"}),
    "model.mrope_section": (
        {"--position-embedding-type": "mrope", "--mrope-section": "2 1 1"},
        {"--mrope-section": "2 1 2"},
    ),
    "model.mrope_interleaved": (
        {"--position-embedding-type": "mrope", "--mrope-section": "1 2 1"},
        {"--mrope-interleaved": ""},
    ),
    "model.no_rope_freq": (ROPE, {"--no-rope-freq": "2"}),
    "model.normalization": ({}, {"--normalization": "RMSNorm"}),
    "model.norm_epsilon": ({}, {"--norm-epsilon": "0.1"}),
    "model.apply_layernorm_1p": (
        {},
        {"--apply-layernorm-1p": ""},
    ),
    "model.norm_bias": ({}, {"--no-norm-bias": ""}),
    "model.norm_placement": ({}, {"--norm-placement": "sandwich"}),
    "model.parallel_residual": ({}, {"--parallel-residual": "two_norms"}),
    "model.residual_multiplier": ({}, {"--residual-multiplier": "0.5"}),
    "model.embedding_multiplier": ({}, {"--embedding-multiplier": "4"}),
    "model.logits_scaling": ({}, {"--logits-scaling": "4"}),
    "model.final_logit_softcapping": ({}, {"--final-logit-softcapping": "0.1"}),
    "model.activation": ({}, {"--activation": "gelu_tanh"}),
    "model.activation_func_clamp_value": (
        {"--activation": "quick_geglu"},
        {"--activation-func-clamp-value": "0.01"},
    ),
    "model.glu_linear_offset": ({"--activation": "quick_geglu"}, {"--glu-linear-offset": "1"}),
    "model.add_bias_linear": ({}, {"--disable-bias-linear": ""}),
    "model.add_qkv_bias": ({"--disable-bias-linear": ""}, {"--add-qkv-bias": ""}),
    "model.add_attention_out_bias": (
        {"--disable-bias-linear": ""},
        {"--add-attention-out-bias": ""},
    ),
    "model.add_mlp_bias": ({"--disable-bias-linear": ""}, {"--add-mlp-bias": ""}),
    "model.untie_embeddings_and_output_weights": (
        {},
        {"--untie-embeddings-and-output-weights": ""},
    ),
    "model.multi_latent_attention": (ROPE, {"--multi-latent-attention": ""}),
    "model.q_lora_rank": (LATENT, {"--q-lora-rank": "4"}),
    "model.kv_lora_rank": (LATENT, {"--kv-lora-rank": "4"}),
    "model.qk_head_dim": (LATENT, {"--qk-head-dim": "4"}),
    "model.qk_pos_emb_head_dim": (LATENT, {"--qk-pos-emb-head-dim": "8"}),
    "model.v_head_dim": (LATENT, {"--v-head-dim": "4"}),
    "model.experimental_attention_variant": ({}, LINEAR),
    "model.dsa_indexer_n_heads": (SPARSE, {"--dsa-indexer-n-heads": "4"}),
    "model.dsa_indexer_head_dim": (SPARSE, {"--dsa-indexer-head-dim": "16"}),
    "model.dsa_indexer_topk": (SPARSE, {"--dsa-indexer-topk": "1"}),
    "model.dsa_indexer_loss_coeff": (SPARSE, {"--dsa-indexer-loss-coeff": "0.5"}),
    "model.dsa_indexer_use_sparse_loss": (
        {**SPARSE, "--dsa-indexer-loss-coeff": "0.5"},
        {"--dsa-indexer-use-sparse-loss": ""},
    ),
    "model.linear_attention_freq": (LINEAR, {"--linear-attention-freq": "[0,1]"}),
    "model.linear_conv_kernel_dim": (LINEAR, {"--linear-conv-kernel-dim": "2"}),
    "model.linear_key_head_dim": (LINEAR, {"--linear-key-head-dim": "4"}),
    "model.linear_value_head_dim": (LINEAR, {"--linear-value-head-dim": "4"}),
    "model.linear_num_key_heads": (LINEAR, {"--linear-num-key-heads": "8"}),
    "model.linear_num_value_heads": (LINEAR, {"--linear-num-value-heads": "16"}),
    "model.qk_layernorm": ({}, {"--qk-layernorm": ""}),
    "model.qk_layernorm_scope": (
        {"--qk-layernorm": "", "--normalization": "RMSNorm"},
        {"--qk-layernorm-scope": "projection"},
    ),
    "model.softmax_type": ({}, {"--softmax-type": "off-by-one"}),
    "model.attention_output_gate": ({}, {"--attention-output-gate": ""}),
    "model.scale_alibi": ({"--position-embedding-type": "alibi"}, {"--scale-alibi": ""}),
    "model.qk_l2_norm": (ROPE, {"--qk-l2-norm": ""}),
    "model.attn_temperature_scale": (
        {**TEMPERATURE, "--attn-temperature-floor": "1"},
        {"--attn-temperature-scale": "1"},
    ),
    "model.attn_temperature_floor": (
        TEMPERATURE,
        {"--attn-temperature-floor": "1"},
    ),
    "model.heterogeneous_layers_config_encoded_json": (
        {},
        {"--heterogeneous-layers-config-encoded-json": '[{"attention":{"no_op":true}},{}]'},
    ),
    "model.layer_modules": (
        {},
        {"--layer-modules": "mlp=megatron_models.components.linear.spec:LinearSpec"},
    ),
    "model.softmax_scale": ({}, {"--softmax-scale": "0.01"}),
    "model.sliding_window": ({}, {"--sliding-window": "2"}),
    "model.attention_chunk_size": ({}, {"--attention-chunk-size": "2"}),
    "model.window_attn_skip_freq": (
        {"--sliding-window": "2"},
        {"--window-attn-skip-freq": "2"},
    ),
    "model.attn_logit_softcapping": ({}, {"--attn-logit-softcapping": "0.01"}),
    "model.num_experts": ({}, EXPERTS),
    "model.moe_router_topk": (EXPERTS, {"--moe-router-topk": "3"}),
    "model.moe_ffn_hidden_size": (EXPERTS, {"--moe-ffn-hidden-size": "24"}),
    "model.moe_shared_expert_intermediate_size": (
        EXPERTS,
        {"--moe-shared-expert-intermediate-size": "8"},
    ),
    "model.moe_expert_capacity_factor": (EXPERTS, {"--moe-expert-capacity-factor": "0.5"}),
    "model.moe_token_drop_policy": (
        {**EXPERTS, "--moe-expert-capacity-factor": "0.5"},
        {"--moe-token-drop-policy": "position"},
    ),
    "model.moe_pad_expert_input_to_capacity": (
        {**EXPERTS, "--moe-expert-capacity-factor": "0.5"},
        {"--moe-pad-expert-input-to-capacity": ""},
    ),
    "model.moe_expert_rank_capacity_factor": (
        EXPERTS,
        {"--moe-expert-rank-capacity-factor": "0.5"},
    ),
    "model.moe_layer_freq": (EXPERTS, {"--moe-layer-freq": "[0]+[1]"}),
    "model.moe_router_pre_softmax": (EXPERTS, {"--moe-router-pre-softmax": ""}),
    "model.moe_router_score_function": (EXPERTS, {"--moe-router-score-function": "sigmoid"}),
    "model.moe_router_enable_expert_bias": (SIGMOID, {"--moe-router-enable-expert-bias": ""}),
    "model.moe_router_bias_update_rate": (
        {**SIGMOID, "--moe-router-enable-expert-bias": ""},
        {"--moe-router-bias-update-rate": "10"},
    ),
    "model.moe_router_load_balancing_type": (
        {**EXPERTS, "--moe-aux-loss-coeff": "1"},
        {"--moe-router-load-balancing-type": "seq_aux_loss"},
    ),
    "model.moe_aux_loss_coeff": (EXPERTS, {"--moe-aux-loss-coeff": "1"}),
    "model.moe_router_norm_topk_prob": (SIGMOID, {"--moe-router-norm-topk-prob": "no"}),
    "model.moe_router_topk_scaling_factor": (EXPERTS, {"--moe-router-topk-scaling-factor": "2"}),
    "model.moe_router_num_groups": (
        {**EXPERTS, "--num-experts": "8", **GROUPS},
        {"--moe-router-num-groups": "4"},
    ),
    "model.moe_router_group_topk": (
        {**EXPERTS, "--num-experts": "8", **GROUPS, "--moe-router-num-groups": "4"},
        {"--moe-router-group-topk": "2"},
    ),
    "model.moe_router_group_score_topk": (
        {**EXPERTS, **GROUPS},
        {"--moe-router-group-score-topk": "1"},
    ),
    "model.moe_router_add_bias": (EXPERTS, {"--moe-router-add-bias": ""}),
    "model.moe_router_expert_choice": (PRE_SOFTMAX, {"--moe-router-expert-choice": ""}),
    "model.moe_router_force_load_balancing": (EXPERTS, {"--moe-router-force-load-balancing": ""}),
    "model.moe_apply_probs_on_input": (EXPERTS, {"--moe-apply-probs-on-input": ""}),
    "model.moe_router_dtype": (
        {**EXPERTS, "--init-method-std": "1"},
        {"--moe-router-dtype": "fp64"},
    ),
    "model.moe_input_jitter_eps": (EXPERTS, {"--moe-input-jitter-eps": "0.3"}),
    "model.moe_seq_aux_loss_coeff": (EXPERTS, {"--moe-seq-aux-loss-coeff": "1"}),
    "model.moe_global_aux_loss_coeff": (EXPERTS, {"--moe-global-aux-loss-coeff": "1"}),
    "model.moe_shared_expert_gate": (
        {**EXPERTS, "--moe-shared-expert-intermediate-size": "8"},
        {"--moe-shared-expert-gate": ""},
    ),
    "model.mtp_num_layers": ({}, {"--mtp-num-layers": "1"}),
    "model.mtp_loss_scaling_factor": (
        {"--mtp-num-layers": "1"},
        {"--mtp-loss-scaling-factor": "0.7"},
    ),
    "model.moe_z_loss_coeff": (EXPERTS, {"--moe-z-loss-coeff": "1"}),
    "model.use_mup": ({}, MUP),
    # Refused: the task of the command predicts tokens.
    "model.task_head": ({}, {"--task-head": "reward"}),
    "model.num_labels": ({}, {"--num-labels": "3"}),
    "model.head_pooling": ({}, {"--head-pooling": "mean"}),
    "model.normalize_embedding": ({}, {"--no-normalize-embedding": ""}),
    "model.mup_base_hidden_size": (MUP, {"--mup-base-hidden-size": "4"}),
    "model.mup_base_head_dim": (MUP, {"--mup-base-head-dim": "4"}),
    "model.mup_attn_scale_power": (MUP, {"--mup-attn-scale-power": "0.5"}),
    "model.init_method_std": ({}, {"--init-method-std": "0.1"}),
    "data.seq_length": ({}, {"--seq-length": "8"}),
    "data.data_path": ({}, {"--data-path": "other"}),
    "data.train_data_path": (BY_SPLIT, {"--train-data-path": "other"}),
    "data.valid_data_path": (BY_SPLIT, {"--valid-data-path": "other"}),
    "data.test_data_path": (BY_SPLIT, {"--test-data-path": "other"}),
    "data.mock_data": ({}, {"--mock-data": "", "--data-path": None}),
    "data.split": ({}, {"--split": "3,6,1"}),
    "data.tokenizer_type": (BERT, {"--tokenizer-type": "BertWordPieceLowerCase"}),
    "data.tokenizer_model": ({"--vocab-size": "257"}, {"--tokenizer-model": None}),
    "data.vocab_file": (GPT2, {"--vocab-file": "another"}),
    "data.merge_file": (GPT2, {"--merge-file": "no-merges"}),
    "data.vocab_extra_ids": (BERT, {"--vocab-extra-ids": "200"}),
    "data.tiktoken_pattern": (TIKTOKEN, {"--tiktoken-pattern": "v1"}),
    "data.tiktoken_num_special_tokens": (TIKTOKEN, {"--tiktoken-num-special-tokens": "200"}),
    "data.tokenizer_special_tokens": (GPT2, {"--tokenizer-special-tokens": "<fim_prefix>"}),
    "data.sft_tokenizer_prompt_format": (CHAT, {"--sft-tokenizer-prompt-format": "identity"}),
    "data.chat_template": (CHAT, {"--chat-template": "template"}),
    "data.tokenizer_prompt_format": (IMAGES, {"--tokenizer-prompt-format": "nemotron5"}),
    "data.image_tag_type": (IMAGES, {"--image-tag-type": "nvlm"}),
    "data.force_system_message": (IMAGES, {"--force-system-message": ""}),
    "data.allow_tokenizer_mismatch": (
        {"--data-path": "foreign_text_document"},
        {"--allow-tokenizer-mismatch": ""},
    ),
    "data.reset_position_ids": ({}, {"--reset-position-ids": ""}),
    "data.reset_attention_mask": ({}, {"--reset-attention-mask": ""}),
    "data.eod_mask_loss": ({}, {"--eod-mask-loss": ""}),
    "data.fim_data": ({}, FIM),
    "data.sft": (TALKS, {"--sft": ""}),
    "data.max_document_bytes": (CHAT, {"--max-document-bytes": "20"}),
    "data.max_template_steps": (CHAT, {"--max-template-steps": "3"}),
    "data.max_template_characters": (CHAT, {"--max-template-characters": "3"}),
    "data.sample_order": ({}, COMPAT),
    "data.data_path_changes": ({}, {"--data-path-changes": "changes"}),
    "data.data_cache_path": (COMPAT, {"--data-cache-path": "cache"}),
    "data.num_workers": ({}, {"--num-workers": "0"}),
    "data.mmap_bin_files": ({}, {"--no-mmap-bin-files": ""}),
    "data.object_storage_cache_path": (
        {"--data-path": "memory://text"},
        {"--object-storage-cache-path": "storage"},
    ),
    "fim.rate": (FIM, {"--fim-rate": "1"}),
    "fim.spm_rate": (FIM, {"--fim-spm-rate": "1"}),
    "fim.split_sample": (FIM, {"--fim-split-sample": "#"}),
    "fim.fragment_rate": (FILES, {"--fim-fragment-rate": "0"}),
    "fim.no_prefix": ({**FIM, "--fim-rate": "1"}, {"--fim-no-prefix": "!"}),
    "fim.prefix_token": (FIM, {"--fim-prefix-token": "d"}),
    "fim.middle_token": (FIM, {"--fim-middle-token": "d"}),
    "fim.suffix_token": (FIM, {"--fim-suffix-token": "d"}),
    "training.task": ({}, {"--task": "gtp"}),
    "placement.cross_entropy_fusion_impl": ({}, {"--cross-entropy-fusion-impl": "linear"}),
    "placement.cross_entropy_loss_fusion": ({}, {"--no-cross-entropy-loss-fusion": ""}),
    "placement.bias_gelu_fusion": ({}, {"--no-bias-gelu-fusion": ""}),
    "placement.bias_swiglu_fusion": ({"--activation": "swiglu"}, {"--no-bias-swiglu-fusion": ""}),
    "placement.bias_dropout_fusion": ({}, {"--no-bias-dropout-fusion": ""}),
    "placement.rope_fusion": (ROPE, {"--no-rope-fusion": ""}),
    "placement.transformer_impl": ({}, {"--transformer-impl": "transformer_engine"}),
    "placement.attention_backend": ({}, {"--attention-backend": "local"}),
    "placement.flash_attention_version": (
        {"--attention-backend": "flash"},
        {"--flash-attention-version": "3"},
    ),
    "placement.kernel_backends": ({}, {"--kernel-backends": "layer_norm=reference gelu=reference"}),
    "placement.batch_invariant_mode": ({}, {"--batch-invariant-mode": ""}),
    "low_precision.fp8_format": ({}, {"--fp8-format": "hybrid"}),
    "low_precision.fp8_recipe": (FP8, {"--fp8-recipe": "mxfp8"}),
    "low_precision.fp8_margin": (FP8, {"--fp8-margin": "3"}),
    "low_precision.fp8_amax_history_len": (
        {**FP8, "--fp8-amax-compute-algo": "max"},
        {"--fp8-amax-history-len": "2"},
    ),
    "low_precision.fp8_amax_compute_algo": (
        {**FP8, "--fp8-amax-history-len": "3"},
        {"--fp8-amax-compute-algo": "max"},
    ),
    "low_precision.fp8_wgrad": (FP8, {"--no-fp8-wgrad": ""}),
    "low_precision.first_last_layers_bf16": (
        {**FP8, "--num-layers": "3"},
        {"--first-last-layers-bf16": ""},
    ),
    "low_precision.num_layers_at_start_in_bf16": (ENDS, {"--num-layers-at-start-in-bf16": "0"}),
    "low_precision.num_layers_at_end_in_bf16": (ENDS, {"--num-layers-at-end-in-bf16": "0"}),
    "low_precision.fp4_format": ({}, {"--fp4-format": "e2m1"}),
    "low_precision.fp4_recipe": ({"--fp4-format": "e2m1"}, {"--fp4-recipe": "nvfp4-nearest"}),
    "placement.linear_product": ({}, {"--linear-product": "lora"}),
    "lora.rank": (LORA, {"--lora-rank": "3"}),
    "lora.alpha": (LORA, {"--lora-alpha": "40"}),
    "lora.target_modules": (LORA, {"--lora-target-modules": "linear_qkv linear_fc2"}),
    "training.micro_batch_size": ({}, {"--micro-batch-size": "1"}),
    "training.train_iters": ({"--lr-decay-iters": "8"}, {"--train-iters": "3"}),
    "training.train_samples": (SAMPLES, {"--train-samples": "12"}),
    "training.global_batch_size": ({}, {"--global-batch-size": "2"}),
    "training.rampup_batch_size": (SAMPLES, {"--rampup-batch-size": "2 2 6"}),
    "training.step_batch_size_schedule": (SAMPLES, {"--step-batch-size-schedule": "0:2 64:4"}),
    "training.decrease_batch_size_if_needed": (
        {"--global-batch-size": "5"},
        {"--decrease-batch-size-if-needed": ""},
    ),
    "training.seed": ({}, {"--seed": "1"}),
    "training.bf16": ({}, {"--bf16": ""}),
    "training.fp16": ({}, {"--fp16": ""}),
    "training.float64": ({}, {"--float64": ""}),
    "training.calculate_per_token_loss": (
        {"--eod-mask-loss": ""},
        {"--no-calculate-per-token-loss": ""},
    ),
    "training.compile": ({}, {"--compile": ""}),
    "training.compile_scope": (
        {"--compile": "", "--attention-dropout": "0"},
        {"--compile-scope": "layer"},
    ),
    "training.cuda_graph_impl": (
        {"--compile": "", "--compile-scope": "layer"},
        {"--cuda-graph-impl": "local"},
    ),
    "training.cuda_graph_warmup_steps": ({}, {"--cuda-graph-warmup-steps": "5"}),
    "training.deterministic_mode": ({}, {"--deterministic-mode": ""}),
    "training.device": ({}, {"--device": "cuda"}),
    "training.max_seqlen_per_dp_cp_rank": (POOL, {ROOM: "32"}),
    "placement.moe_token_dispatcher_type": (EXPERTS, {"--moe-token-dispatcher-type": "alltoall"}),
    "training.hidden_dropout": ({}, {"--hidden-dropout": "0.3"}),
    "training.attention_dropout": ({}, {"--attention-dropout": "0.3"}),
    "training.distributed_timeout_minutes": ({}, {"--distributed-timeout-minutes": "1"}),
    "training.iterations_to_skip": ({}, {"--iterations-to-skip": "2 3"}),
    "training.exit_interval": ({}, {"--exit-interval": "3"}),
    "training.exit_duration_in_mins": ({}, {"--exit-duration-in-mins": "1e-9"}),
    "optimizer.optimizer": ({}, {"--optimizer": "sgd"}),
    "optimizer.lr": ({}, {"--lr": "1e-3"}),
    "optimizer.min_lr": ({}, {"--min-lr": "5e-3"}),
    "optimizer.decoupled_lr": ({}, {"--decoupled-lr": "1e-3"}),
    "optimizer.decoupled_min_lr": ({"--decoupled-lr": "9e-3"}, {"--decoupled-min-lr": "5e-3"}),
    "optimizer.lr_warmup_init": ({"--lr-warmup-iters": "2"}, {"--lr-warmup-init": "1e-3"}),
    "optimizer.lr_decay_style": ({}, {"--lr-decay-style": "cosine"}),
    "optimizer.lr_decay_power": (
        {"--lr-decay-style": "polynomial"},
        {"--lr-decay-power": "2"},
    ),
    "optimizer.lr_wsd_decay_style": (WSD, {"--lr-wsd-decay-style": "linear"}),
    "optimizer.weight_decay": ({}, {"--weight-decay": "5"}),
    "optimizer.start_weight_decay": (GROWING, {"--start-weight-decay": "4"}),
    "optimizer.end_weight_decay": (GROWING, {"--end-weight-decay": "9"}),
    "optimizer.weight_decay_incr_style": (GROWING, {"--weight-decay-incr-style": "cosine"}),
    "optimizer.adam_beta1": ({}, {"--adam-beta1": "0.1"}),
    "optimizer.adam_beta2": ({}, {"--adam-beta2": "0.1"}),
    "optimizer.adam_eps": ({}, {"--adam-eps": "0.1"}),
    "optimizer.sgd_momentum": ({"--optimizer": "sgd"}, {"--sgd-momentum": "0.5"}),
    "adam.decoupled_weight_decay": (
        {"--weight-decay": "5"},
        {"--no-decoupled-weight-decay": ""},
    ),
    "adam.kernels": ({}, {"--adam-kernels": "apex"}),
    "lion.beta1": ({"--optimizer": "lion"}, {"--lion-beta1": "0.1"}),
    "lion.beta2": ({"--optimizer": "lion"}, {"--lion-beta2": "0.1"}),
    "adafactor.beta2_decay": (ADAFACTOR, {"--adafactor-beta2-decay": "-0.3"}),
    "adafactor.eps1": (ADAFACTOR, {"--adafactor-eps1": "0.1"}),
    "adafactor.eps2": (ADAFACTOR, {"--adafactor-eps2": "1.5"}),
    "adafactor.clip_threshold": (ADAFACTOR, {"--adafactor-clip-threshold": "3"}),
    "muon.momentum": (MUON, {"--muon-momentum": "0.5"}),
    "muon.nesterov": (MUON, {"--muon-nesterov": ""}),
    "muon.num_ns_steps": (MUON, {"--muon-num-ns-steps": "10"}),
    "muon.coefficient_type": (MUON, {"--muon-coefficient-type": "simple"}),
    "muon.scale_mode": (MUON, {"--muon-scale-mode": "shape_scaling"}),
    "muon.extra_scale_factor": (MUON, {"--muon-extra-scale-factor": "0.2"}),
    "muon.split_qkv": (MUON, {"--muon-no-split-qkv": ""}),
    "muon.fp32_matmul_prec": (MUON, {"--muon-fp32-matmul-prec": "medium"}),
    "muon.scalar_optimizer": (MUON, {"--muon-scalar-optimizer": "lion"}),
    "optimizer.clip_grad": ({}, {"--clip-grad": "0.01"}),
    "optimizer.lr_mult": ({}, {"--lr-mult": "*.bias=0.5 layers.1.*=2"}),
    "optimizer.weight_decay_mult": (
        {"--weight-decay": "5"},
        {"--weight-decay-mult": "*norm*=1 layers.0.*=0"},
    ),
    "optimizer.apply_wd_to_qk_layernorm": (
        {"--weight-decay": "5", "--qk-layernorm": ""},
        {"--apply-wd-to-qk-layernorm": ""},
    ),
    "optimizer.embedding_weight_decay": (
        {"--weight-decay": "5"},
        {"--no-embedding-weight-decay": ""},
    ),
    "loss_scale.loss_scale": (SCALED, {"--loss-scale": "64"}),
    "loss_scale.initial_loss_scale": (SCALED, {"--initial-loss-scale": "1e10"}),
    "loss_scale.min_loss_scale": (SCALED, {"--min-loss-scale": str(2**32)}),
    "loss_scale.loss_scale_window": (
        {**SCALED, "--initial-loss-scale": "64"},
        {"--loss-scale-window": "1"},
    ),
    "loss_scale.hysteresis": (SCALED, {"--hysteresis": "1"}),
    "state_formats.use_precision_aware_optimizer": (
        {"--exp-avg-dtype": "bf16"},
        {"--use-precision-aware-optimizer": ""},
    ),
    "state_formats.exp_avg_dtype": (AWARE, {"--exp-avg-dtype": "fp8"}),
    "state_formats.exp_avg_sq_dtype": (AWARE, {"--exp-avg-sq-dtype": "fp16"}),
    "state_formats.main_params_dtype": (
        {**AWARE, "--bf16": ""},
        {"--main-params-dtype": "bf16"},
    ),
    "offload.optimizer_cpu_offload": ({}, {"--optimizer-cpu-offload": ""}),
    "offload.optimizer_offload_fraction": ({}, {"--optimizer-offload-fraction": "0.5"}),
    "offload.overlap_cpu_optimizer_d2h_h2d": ({}, {"--overlap-cpu-optimizer-d2h-h2d": ""}),
    "spikes.skip_grad_norm": ({}, {"--skip-grad-norm": "1e-6"}),
    "spikes.skip_grad_norm_spike": (
        {"--spike-window": "1", "--skip-loss-spike": "1e6"},
        {"--skip-grad-norm-spike": "1.000001"},
    ),
    "spikes.skip_loss_spike": (
        {"--spike-window": "1", "--skip-grad-norm-spike": "1e6", "--lr": "1"},
        {"--skip-loss-spike": "1.000001"},
    ),
    "spikes.spike_window": (
        {"--skip-grad-norm-spike": "1.000001", "--spike-window": "1"},
        {"--spike-window": "2"},
    ),
    "logging.log_num_zeros_in_grad": ({}, {"--log-num-zeros-in-grad": ""}),
    "logging.log_params_norm": ({}, {"--log-params-norm": ""}),
    "logging.log_layer_norms": ({}, {"--log-layer-norms": ""}),
    "logging.log_update_ratios": ({}, {"--log-update-ratios": ""}),
    "logging.log_layer_outputs": ({}, {"--log-layer-outputs": ""}),
    "logging.log_max_attention_logit": ({}, {"--log-max-attention-logit": ""}),
    "qk_clip.qk_clip": ({}, {"--qk-clip": "", "--qk-clip-threshold": "1e-6"}),
    "qk_clip.qk_clip_alpha": (CLIPPED, {"--qk-clip-alpha": "0.25"}),
    "qk_clip.qk_clip_threshold": (CLIPPED, {"--qk-clip-threshold": "2e-6"}),
    "averages.ema_decay": ({}, {"--ema-decay": "0.5"}),
    "averages.ema_evaluate": ({"--ema-decay": "0.5"}, {"--ema-evaluate": "trained"}),
    "schedule.lr_decay_iters": ({}, {"--lr-decay-iters": "9"}),
    "schedule.lr_decay_samples": (SAMPLES, {"--lr-decay-samples": "40"}),
    "schedule.lr_warmup_iters": ({}, {"--lr-warmup-iters": "2"}),
    "schedule.lr_warmup_samples": (SAMPLES, {"--lr-warmup-samples": "8"}),
    "schedule.lr_warmup_fraction": ({}, {"--lr-warmup-fraction": "0.5"}),
    "schedule.lr_wsd_decay_iters": (WSD, {"--lr-wsd-decay-iters": "4"}),
    "schedule.lr_wsd_decay_samples": (
        {**SAMPLES, "--lr-decay-style": "WSD", "--lr-wsd-decay-samples": "8"},
        {"--lr-wsd-decay-samples": "16"},
    ),
    "layout.hybrid_cp": ({**POOL, "--hybrid-context-parallel": None, ROOM: None}, POOL),
    "data_parallel.use_distributed_optimizer": ({}, SHARDED),
    "data_parallel.overlap_grad_reduce": (
        {**SHARDED, "--bf16": ""},
        {"--no-overlap-grad-reduce": ""},
    ),
    "data_parallel.overlap_param_gather": (SHARDED, {"--overlap-param-gather": ""}),
    "data_parallel.accumulate_allreduce_grads_in_fp32": (
        {"--bf16": ""},
        {"--no-accumulate-allreduce-grads-in-fp32": ""},
    ),
    "data_parallel.ddp_reduce_scatter_with_fp32_accumulation": (
        {"--bf16": "", "--grad-reduce-in-bf16": ""},
        {"--ddp-reduce-scatter-with-fp32-accumulation": ""},
    ),
    "data_parallel.gradient_accumulation_fusion": ({}, {"--no-gradient-accumulation-fusion": ""}),
    "data_parallel.check_for_nan_in_loss_and_grad": (
        {"--lr": "1e38"},
        {"--no-check-for-nan-in-loss-and-grad": ""},
    ),
    "data_parallel.ddp_bucket_size": ({}, {"--ddp-bucket-size": "1000"}),
    "recompute.granularity": ({}, {"--recompute-granularity": "selective"}),
    "recompute.method": (FULL, {"--recompute-method": "block"}),
    "recompute.num_layers": (FULL, {"--recompute-num-layers": "2"}),
    "recompute.modules": (SELECTIVE, {"--recompute-modules": "core_attn mlp"}),
    "recompute.cpu_offloading_num_layers": ({}, {"--cpu-offloading-num-layers": "1"}),
    "evaluation.eval_interval": ({}, {"--eval-interval": "2"}),
    "evaluation.eval_iters": ({}, {"--eval-iters": "2"}),
    "checkpoint.save": ({"--save": None}, {"--save": "out"}),
    "checkpoint.load": ({"--train-iters": "6", "--lr-decay-iters": "8"}, LOAD),
    "checkpoint.save_interval": ({}, {"--save-interval": "2"}),
    "checkpoint.keep_last": ({"--save-interval": "2"}, {"--keep-last": "1"}),
    "checkpoint.finetune": (LOAD, {"--finetune": ""}),
    "checkpoint.pretrained_checkpoint": ({}, {"--pretrained-checkpoint": "trained"}),
    "checkpoint.model_family": ({}, {"--model-family": "gpt2"}),
    "checkpoint.no_load_optim": (LOAD, {"--no-load-optim": ""}),
    "checkpoint.no_load_rng": ({**LOAD, "--seed": "5"}, {"--no-load-rng": ""}),
    "checkpoint.allow_changed_run": (
        {**LOAD, "--hidden-dropout": "0.3"},
        {"--allow-changed-run": "objective"},
    ),
    "checkpoint.use_checkpoint_opt_param_scheduler": (
        {**LOAD, "--lr": "1e-3"},
        {"--use-checkpoint-opt-param-scheduler": ""},
    ),
    "checkpoint.override_opt_param_scheduler": (
        {**LOAD, "--lr-decay-iters": "9"},
        {"--override-opt-param-scheduler": ""},
    ),
    "checkpoint.extend_schedule": (
        {**LOAD, "--lr-decay-iters": "9"},
        {"--extend-schedule": "decay"},
    ),
    "checkpoint.use_checkpoint_args": (
        {**LOAD, "--hidden-size": None},
        {"--use-checkpoint-args": ""},
    ),
    "checkpoint.exit_on_missing_checkpoint": (
        {"--load": "nowhere"},
        {"--exit-on-missing-checkpoint": ""},
    ),
    "logging.log_interval": ({}, {"--log-interval": "1"}),
    "logging.log_throughput": ({}, {"--log-throughput": ""}),
    "logging.moe_per_layer_logging": (EXPERTS, {"--moe-per-layer-logging": ""}),
    "logging.tensorboard_dir": ({}, {"--tensorboard-dir": "board"}),
    "logging.progress": ({}, {"--no-progress": ""}),
}

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

pytestmark = pytest.mark.usefixtures("plain_runs")

VOLATILE = (
    (r"^ \[[^]]*\]", ""),
    (r"(elapsed time per iteration \(ms\)|tokens/s|MFU|TFLOP/s/GPU\)): [\d.]+", r"\1"),
)
"""Parts of printed lines that differ between equal runs."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Returns a folder with corpora, tokenizers and a run to continue."""
    folder = tmp_path_factory.mktemp("prepared")
    ByteTokenizer().save(folder / "bytes")
    with IndexedDatasetBuilder(str(folder / "talks_loss"), "uint8") as builder:
        for _ in range(60):
            builder.add_item([0, 0, 0, 1, 1, 1, 0, 1, 1, 1])
            builder.end_document()
        builder.finalize()
    for name, step in (("text", 1), ("other", 3), ("talks", 2)):
        with IndexedDatasetBuilder(str(folder / name), "uint16") as builder:
            for start in range(60):
                builder.add_item([*((start + step * i) % 250 for i in range(9)), 256])
                builder.end_document()
            builder.finalize()
    (folder / "foreign.jsonl").write_text('{"text": "1 2 3 4 5 6 7 8 9"}\n' * 60)
    preprocess([folder / "foreign.jsonl"], folder / "foreign", NullTokenizer(250))
    for name in ("text.bin", "text.idx"):
        fsspec.filesystem("memory").pipe(f"/{name}", (folder / name).read_bytes())
    train_bpe(["you see the image there"], 300).save(folder / "chat")
    turns = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "see"}]
    rows = [{"messages": [{**turn, "content": turn["content"] + str(n)} for turn in turns]}
            for n in range(60)]  # fmt: skip
    (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "template").write_text("{% for m in messages %}{% generation %}{{ m.content }}"
                                     "{% endgeneration %}{% endfor %}")  # fmt: skip
    tokens = {chr(256 + n): n for n in range(256)} | {"<|endoftext|>": 256}
    (folder / "vocab").write_text(json.dumps(tokens | {chr(256) * 2: 257}))
    (folder / "merges").write_text(f"{chr(256)} {chr(256)}\n")
    (folder / "no-merges").write_text("#version: 0.2\n")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *tokens]
    (folder / "words").write_text("\n".join(words))
    ranks = [{"rank": n, "token_bytes": b64encode(bytes([n])).decode()} for n in range(256)]
    (folder / "ranks").write_text(json.dumps(ranks))
    (folder / "changes").write_text('[{"from_sample": 8, "data_path": "other"}]')
    (folder / "another").write_text(json.dumps(tokens | {chr(256) * 2: 300}))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(command({**BASE, "--lr-decay-iters": "8", "--save": "trained"})) == 0
    return folder


@pytest.fixture(scope="module")
def unchanged():
    """Returns a cache of the observations of contexts."""
    return {}


class Probes:
    """Records calls of a run that have no other visible effect on one rank."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.observed: dict[str, Any] = {"bars": 0, "compiled": 0, "micro-batches": []}
        self.observed["runs"] = self.observed["offloaded"] = self.observed["reads"] = 0
        bind, run, train = Mesh.bind, StepEngine.run, Trainer.run
        opened = tokenizer.open_tokenizer

        def recording_bind(*args: Any, **options: Any) -> Mesh:
            self.observed["timeout"] = options["timeout"]
            return bind(*args, **options)

        def recording_run(engine: StepEngine, batches: Any, *rest: Any) -> Any:
            self.observed["micro-batches"].append(len(batches))
            self.observed["deterministic"] = torch.are_deterministic_algorithms_enabled()
            return run(engine, batches, *rest)

        def recording_train(trainer: Trainer) -> Any:
            engine = trainer.engine
            parameters = engine.stages.parameters
            self.observed["buckets"] = [len(b.buckets) for b in engine.stages.buffers]
            self.observed["sharded"] = len(engine.stages.shards)
            self.observed["fused"] = engine.fusion.fused
            self.observed["waiting"] = sum(
                len(module._forward_pre_hooks)
                for stage in trainer.task.stages
                for module in stage.modules()
            )
            self.observed["loss"] = [stage.vocabulary_loss for stage in trainer.task.stages]
            self.observed["products"] = {
                type(module.product).__name__
                for stage in trainer.task.stages
                for module in stage.modules()
                if hasattr(module, "product")
            }
            self.observed["elements"] = {name: p.shape for name, p in parameters.items()}
            blocks = [m for stage in trainer.task.stages for m in stage.modules()]
            self.observed["dispatchers"] = [
                type(block.dispatcher).__name__ for block in blocks if hasattr(block, "dispatcher")
            ]
            return train(trainer)

        def recording_open(*args: Any) -> Any:
            tokenizer = opened(*args)
            self.observed["tokenizer"] = tokenizer and tokenizer.fingerprint
            return tokenizer

        finish = gradients.finish_buffers

        def recording_finish(buffers: Sequence[GradientBuffers]) -> None:
            buckets = [bucket for each in buffers for bucket in each.buckets]
            self.observed["early"] = sum(bucket.launched for bucket in buckets)
            finish(buffers)

        patch.setattr(gradients, "finish_buffers", recording_finish)
        function, pack = checkpointing.checkpoint, OffloadSavedTensors._pack

        def recording_checkpoint(*args: Any, **options: Any) -> Any:
            self.observed["runs"] += 1
            return function(*args, **options)

        def recording_pack(memory: OffloadSavedTensors, tensor: Any) -> Any:
            self.observed["offloaded"] += 1
            return pack(memory, tensor)

        ahead = batches.read_ahead

        def recording_ahead(steps: Any, count: int) -> Any:
            self.observed["ahead"] = count
            return ahead(steps, count)

        read = FileTokens.__getitem__

        def recording_read(tokens: FileTokens, part: slice) -> Any:
            self.observed["reads"] += 1
            return read(tokens, part)

        patch.setattr(batches, "read_ahead", recording_ahead)
        patch.setattr(FileTokens, "__getitem__", recording_read)
        patch.setattr(checkpointing, "checkpoint", recording_checkpoint)
        patch.setattr(OffloadSavedTensors, "_pack", recording_pack)
        patch.setattr(tokenizer, "open_tokenizer", recording_open)
        patch.setattr(Mesh, "bind", recording_bind)
        patch.setattr(StepEngine, "run", recording_run)
        patch.setattr(Trainer, "run", recording_train)
        patch.setattr(torch, "compile", self._compiled)
        patch.setattr(Console, "start_bar", self._bar)

    def _compiled(self, stage: Any, **_: Any) -> Any:
        self.observed["compiled"] += 1
        return stage

    def _bar(self, *_: Any) -> None:
        self.observed["bars"] += 1


def observe(words: Words, prepared: Path, folder: Path, capsys: Any) -> dict[str, Any]:
    """Runs `pretrain gpt` in a copy of the prepared folder and returns the observable results."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    shutil.copytree(prepared, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        probes = Probes(patch)
        capsys.readouterr()
        status = main(command(words))
    torch.set_num_threads(threads)
    printed = capsys.readouterr()
    records = folder / "out" / "metrics.jsonl"
    return {
        "status": status,
        "printed": [
            without_volatile_parts(line) for line in printed.out.splitlines() if is_compared(line)
        ],
        "errors": printed.err,
        "files": sorted(re.sub(r"\d{6,}.*", "", str(p.relative_to(folder))) for p in files(folder)),
        "records": [comparable_record(line) for line in records.open()] if records.exists() else [],
        "probes": probes.observed,
        "families": families(folder / "out"),
    }


def observe_once(
    known: dict[str, Any], words: Words, prepared: Path, folder: Path, capsys: Any
) -> dict[str, Any]:
    """Returns the results of `observe`, from ``known`` if another test has run the same words."""
    key = json.dumps(words)
    if key not in known:
        known[key] = observe(words, prepared, folder, capsys)
    return known[key]


def families(folder: Path) -> list[str | None]:
    """Returns the family that each checkpoint records."""
    records = (Checkpoint(path).model for path in sorted(folder.glob("iter_*")))
    return [None if record is None else record.family for record in records]


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if "tfevents" not in path.name or path.is_dir()]


def is_compared(line: str) -> bool:
    return not line.startswith(("  ", "configuration", "environment", "model:", "MFU is", "---"))


def without_volatile_parts(line: str) -> str:
    for pattern, text in VOLATILE:
        line = re.sub(pattern, text, line)
    return line


def comparable_record(line: str) -> dict[str, Any]:
    record = json.loads(line)
    return {} if record.get("event") == "start" else {**record, "seconds": None}


def test_every_option_is_covered():
    """Checks the options of the task gpt; test_pretrain_bert.py and others check their own."""
    of_task = {option.key for option in run_options("gpt", SelectedExtensions("gpt"))}
    own = [option for option in documented_options() if option.key in of_task]
    options = [option.key for option in own]
    elsewhere = ON_RANKS.keys() - {LAYERS_PER_VIRTUAL_STAGE}
    assert sorted(EFFECTS) == sorted(key for key in options if key not in elsewhere)
    assert elsewhere <= set(options)
    flags = {option.key: (option.flag, option.opposite) for option in own}
    changes = {key: change for key, (_, change) in EFFECTS.items()}
    changes |= {key: ON_RANKS[key].change for key in elsewhere}
    for key, change in changes.items():
        assert set(flags[key]) & set(change), key


def test_equal_runs_compare_equal(prepared, tmp_path, capsys):
    first, second = (observe(BASE, prepared, tmp_path / n, capsys) for n in ("a", "b"))
    assert first == second
    assert first["status"] == 0
    assert len(first["records"]) == 10  # start, 4 steps, 2 log lines, validation, test, end


@pytest.mark.sampled(5)
@pytest.mark.parametrize("key", EFFECTS)
def test_a_flag_changes_the_run(key, prepared, unchanged, tmp_path, capsys):
    context, change = EFFECTS[key]
    before = {**BASE, **context}
    without = observe_once(unchanged, before, prepared, tmp_path / "without", capsys)
    after = observe({**before, **change}, prepared, tmp_path / "with", capsys)
    assert after != without
    if key in REFUSALS:
        assert after["status"] == 1 and REFUSALS[key] in after["errors"]
    else:
        assert after["status"] == 0, after["errors"]


FP32 = "--accumulate-allreduce-grads-in-fp32"
ALIAS_CONTEXTS: dict[str, Words] = {
    "--disable-fp8-wgrad": FP8,
    "--grad-reduce-in-bf16": {"--bf16": ""},
    "--main-grads-dtype": {"--bf16": ""},
    "--grad-reduce-in-fp32": {"--bf16": "", f"--no-{FP32[2:]}": ""},
    "--use-rope-scaling": {**ROPE, "--seq-length": "64", "--rope-scaling-original-length": "8"},
    "--rotary-seq-len-interpolation-factor": ROPE,
    "--rotary-scaling-factor": YARN,
    "--yarn-original-max-position-embeddings": {**ROPE, "--rope-scaling-type": "yarn"},
    "--moe-layer-recompute": EXPERTS,
    "--use-checkpoint-opt_param-scheduler": {**LOAD, "--lr": "1e-3"},
    "--override-opt_param-scheduler": {**LOAD, "--lr-decay-iters": "9"},
}
ALIAS_VALUES = {
    "--encoder-seq-length": "8",
    "--decoder-num-layers": "1",
    "--window-size": "1,0",
    "--rotary-seq-len-interpolation-factor": "2",
    "--mup-embedding-mult": "2",
    "--mup-output-mult": "0.5",
    "--rotary-scaling-factor": "2",
    "--yarn-original-max-position-embeddings": "64",
    "--layernorm-epsilon": "0.1",
    "--main-grads-dtype": "bf16",
    "--persistent-save-interval": "2",
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "flag",
    # One is for hybrid models: integration_tests/test_recurrent_runs.py.
    sorted(
        ALIASES.keys() - {"--virtual-pipeline-model-parallel-size", "--hybrid-override-pattern"}
    ),
)
def test_an_alias_changes_the_run(flag, prepared, unchanged, tmp_path, capsys):
    words = {**BASE, **ALIAS_CONTEXTS.get(flag, {})}
    without = observe_once(unchanged, words, prepared, tmp_path / "without", capsys)
    words[flag] = ALIAS_VALUES.get(flag, "")
    after = observe(words, prepared, tmp_path / "with", capsys)
    assert after != without
    if flag in ALIAS_REFUSALS:
        assert after["status"] == 1 and ALIAS_REFUSALS[flag] in after["errors"]
    else:
        assert after["status"] == 0, after["errors"]
