"""The section ``placement``: how the ranks of a layout compute a model together."""

from dataclasses import dataclass
from typing import Literal

from megatron_train.config.fields import setting


@dataclass(frozen=True)
class PlacementConfig:
    """How a model is placed on the ranks of its layout, and the product of its linear layers.

    The `megatron_models.Placement` of a run consists of these settings, mesh, dtype, device and
    recomputation.
    """

    sequence_parallel: bool = setting(
        False, "split activations along the sequence between tensor parallel regions"
    )
    tp_comm_overlap: bool = setting(
        False,
        "with --sequence-parallel, gather and scatter activations in slices while matrix products "
        "of other slices are computed",
    )
    cp_comm_type: tuple[Literal["p2p", "a2a", "allgather", "a2a+p2p"], ...] = setting(
        ("p2p",),
        "attention over context parallel ranks, for all layers or for each: p2p (a ring), a2a "
        "(heads are scattered), allgather (keys are gathered), a2a+p2p (a2a inside, a ring "
        "outside)",
    )
    context_parallel_split: Literal["zigzag", "per_document"] = setting(
        "zigzag",
        "split of a sequence over context parallel ranks: of the whole sequence (zigzag), or of "
        "each packed document by itself, which balances the work (per_document) (our name)",
    )
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = setting(
        "allgather",
        "communication of tokens to experts on other ranks: every token to every rank (allgather), "
        "or to the ranks of its experts (alltoall)",
    )
    cross_entropy_fusion_impl: Literal["native", "te", "linear", "linear-recompute"] = setting(
        "native",
        "computation of output layer and loss: with the logits of all tokens (native; te is the "
        "same here), or of a slice of the tokens at a time, with gradients in the forward pass "
        "(linear), or logits recomputed in the backward pass (linear-recompute, our name)",
    )
    cross_entropy_loss_fusion: bool = setting(
        True,
        "compute the loss of the logits in one kernel each way, where the device has such a kernel",
    )
    bias_gelu_fusion: bool = setting(
        True,
        "compute GELU and the bias before it in one kernel each way, where the device has such a "
        "kernel; otherwise both by torch",
    )
    bias_swiglu_fusion: bool = setting(
        True,
        "compute SwiGLU and the bias before it, if any, in one kernel each way, where the device "
        "has such a kernel; otherwise both by torch",
    )
    bias_dropout_fusion: bool = setting(
        True,
        "compute hidden dropout and its addition to the residual stream in one kernel each way, "
        "where the device has such a kernel",
    )
    rope_fusion: bool = setting(
        True,
        "separate queries, keys and values and rotate them in one kernel each way, where the "
        "device has such a kernel; otherwise by torch",
    )
    batch_invariant_mode: bool = setting(
        False,
        "compute the logits of a sequence with the same bits alone, in every batch and in chunks, "
        "in tiles of fixed sizes",
    )
    transformer_impl: Literal["local", "transformer_engine"] = setting(
        "local",
        "kernels of linear layers and norms: those of torch (local), or of Transformer Engine, "
        "also in FP8 and FP4",
    )
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = setting(
        "auto",
        "kernels of attention: the first that supports a call (auto), the library flash-attn "
        "(flash), torch's scaled_dot_product_attention with its kernels of cuDNN and others, or "
        "our own with dropout (fused), or the written-out definition (unfused, local)",
    )
    flash_attention_version: Literal[2, 3] | None = setting(
        None, "version of flash-attn for --attention-backend flash; without it 2"
    )
    kernel_backends: tuple[str, ...] = setting(
        (),
        "backends of operations, as OP=BACKEND, such as attention=torch rms_norm=reference, or "
        "several in order (attention=torch,tiles); megatron-kernels list shows them (our name)",
    )
    linear_product: str = setting(
        "plain",
        "product of linear layers: plain, or an installed product, such as lora (low-rank adapters "
        "of a frozen model) (our name)",
    )
