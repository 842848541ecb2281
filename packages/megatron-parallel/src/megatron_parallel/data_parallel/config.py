"""Settings of data parallelism, with Megatron-LM's names. This module does not import torch."""

from dataclasses import dataclass, field
from typing import Any, Final

from megatron_parallel.errors import LayoutError

BUCKET_SIZE: Final = 2**22
"""Default number of elements in a bucket; a larger parameter has a bucket of its own."""


def _flag(flag: str, help_text: str, **metadata: Any) -> dict[str, Any]:
    return {"flag": flag, "help": help_text, **metadata}


@dataclass(frozen=True)
class DataParallelConfig:
    """How gradients are summed over data-parallel ranks, and what each rank holds.

    Raises:
        LayoutError: Settings exclude one another.
    """

    use_distributed_optimizer: bool = field(
        default=False,
        metadata=_flag(
            "--use-distributed-optimizer",
            "shard optimizer state and main weights over the data parallel ranks (ZeRO-1)",
        ),
    )
    overlap_grad_reduce: bool = field(
        default=True,
        metadata=_flag(
            "--overlap-grad-reduce",
            "sum gradients while the backward pass still runs, bucket by bucket",
        ),
    )
    overlap_param_gather: bool = field(
        default=False,
        metadata=_flag(
            "--overlap-param-gather",
            "gather updated weights while the next forward pass runs, bucket by bucket",
        ),
    )
    use_torch_fsdp2: bool = field(
        default=False,
        metadata=_flag(
            "--use-torch-fsdp2",
            "shard weights, gradients and optimizer state over the data parallel ranks (ZeRO-3)",
        ),
    )
    torch_fsdp2_no_reshard_after_forward: bool = field(
        default=False,
        metadata=_flag(
            "--torch-fsdp2-no-reshard-after-forward",
            "keep gathered weights from a forward pass to its backward pass",
        ),
    )
    accumulate_allreduce_grads_in_fp32: bool = field(
        default=True,
        metadata=_flag(
            "--accumulate-allreduce-grads-in-fp32",
            "accumulate and reduce gradients of bf16 and fp16 weights in fp32, not in their dtype",
        ),
    )
    ddp_reduce_scatter_with_fp32_accumulation: bool = field(
        default=False,
        metadata=_flag(
            "--ddp-reduce-scatter-with-fp32-accumulation",
            "send gradients in bf16, but sum them in fp32",
        ),
    )
    gradient_accumulation_fusion: bool = field(
        default=True,
        metadata=_flag(
            "--no-gradient-accumulation-fusion",
            "add weight gradients to main gradients inside the matrix products, if the backend "
            "can; otherwise after them",
        ),
    )
    check_for_nan_in_loss_and_grad: bool = field(
        default=True,
        metadata=_flag(
            "--no-check-for-nan-in-loss-and-grad",
            "end the run and name the parameter if a loss or gradient is not finite; otherwise "
            "skip the step",
        ),
    )
    ddp_bucket_size: int = field(
        default=BUCKET_SIZE,
        metadata=_flag(
            "--ddp-bucket-size", "elements of a bucket of gradients, at most", unit="elements"
        ),
    )

    whole_matrices: bool = field(default=False, metadata={"flag": None})
    """Whether a distributed optimizer gives each matrix to one rank, for rules that need it whole.

    Token embeddings and output matrices are sharded nevertheless.
    """

    def __post_init__(self) -> None:
        if self.ddp_bucket_size < 1:
            raise LayoutError("{ddp_bucket_size} is below 1: use 1 element or more", vars(self))
        if self.use_torch_fsdp2 and self.use_distributed_optimizer:
            raise LayoutError(
                "{use_torch_fsdp2:name} shards optimizer state as well, so it excludes "
                "{use_distributed_optimizer:name}; leave out one of them",
                vars(self),
            )
        if self.torch_fsdp2_no_reshard_after_forward and not self.use_torch_fsdp2:
            raise LayoutError(
                "{torch_fsdp2_no_reshard_after_forward:name} needs {use_torch_fsdp2:name}; use "
                "both or neither",
                vars(self),
            )
        if self.ddp_reduce_scatter_with_fp32_accumulation:
            if self.accumulate_allreduce_grads_in_fp32:
                raise LayoutError(
                    "{ddp_reduce_scatter_with_fp32_accumulation:name} needs gradients that are "
                    "sent in bf16: add --grad-reduce-in-bf16, or leave it out",
                    vars(self),
                )
            if self.use_torch_fsdp2:
                raise LayoutError(
                    "{ddp_reduce_scatter_with_fp32_accumulation:name} excludes "
                    "{use_torch_fsdp2:name}, whose sums are torch's; leave out one of them",
                    vars(self),
                )
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            raise LayoutError(
                "{overlap_param_gather:name} needs {use_distributed_optimizer:name}: without it "
                "every rank updates all weights and gathers none; use both or neither",
                vars(self),
            )
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise LayoutError(
                "{overlap_param_gather:name} needs {overlap_grad_reduce:name}; use both or neither",
                vars(self),
            )

    @property
    def low_precision(self) -> bool:
        """Whether gradients of bf16 and fp16 weights are accumulated and reduced in their dtype."""
        return not (
            self.accumulate_allreduce_grads_in_fp32
            or self.ddp_reduce_scatter_with_fp32_accumulation
        )


DEFAULT_CONFIG: Final = DataParallelConfig()
"""The default configuration."""
