"""Settings of data parallelism, with Megatron-LM's names. Nothing here imports torch."""

from dataclasses import dataclass, field
from typing import Any, Final

from megatron_parallel.errors import LayoutError

BUCKET_SIZE: Final = 2**22
"""Elements of a bucket unless told otherwise; a larger parameter has a bucket of its own."""


def _flag(flag: str, help_text: str, **metadata: Any) -> dict[str, Any]:
    return {"flag": flag, "help": help_text, **metadata}


@dataclass(frozen=True)
class DataParallelConfig:
    """How gradients are summed over data-parallel ranks, and what each rank keeps.

    Raises `LayoutError` for settings that exclude one another.
    """

    use_distributed_optimizer: bool = field(
        default=False,
        metadata=_flag(
            "--use-distributed-optimizer",
            "cut optimizer state and main weights over the data parallel ranks (ZeRO-1)",
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
            "cut weights, gradients and optimizer state over the data parallel ranks (ZeRO-3)",
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
            "add up and sum gradients of bf16 weights in fp32, not in bf16",
        ),
    )
    ddp_reduce_scatter_with_fp32_accumulation: bool = field(
        default=False,
        metadata=_flag(
            "--ddp-reduce-scatter-with-fp32-accumulation",
            "send gradients in bf16 all the same, but add them up in fp32",
        ),
    )
    gradient_accumulation_fusion: bool = field(
        default=True,
        metadata=_flag(
            "--no-gradient-accumulation-fusion",
            "add gradients of weights to main gradients in the products that make them, where the "
            "backend can; otherwise after them",
        ),
    )
    check_for_nan_in_loss_and_grad: bool = field(
        default=True,
        metadata=_flag(
            "--no-check-for-nan-in-loss-and-grad",
            "end the run, naming the parameter, where a loss or gradient is not finite; otherwise "
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

    Token embeddings and output matrices are cut all the same."""

    def __post_init__(self) -> None:
        if self.ddp_bucket_size < 1:
            raise LayoutError("{ddp_bucket_size} is not a number of elements >= 1", vars(self))
        if self.use_torch_fsdp2 and self.use_distributed_optimizer:
            raise LayoutError(
                "{use_torch_fsdp2:name} cuts optimizer state as well, so it does not go together "
                "with {use_distributed_optimizer:name}; leave out one",
                vars(self),
            )
        if self.torch_fsdp2_no_reshard_after_forward and not self.use_torch_fsdp2:
            raise LayoutError(
                "{torch_fsdp2_no_reshard_after_forward:name} needs {use_torch_fsdp2:name}; give "
                "both or neither",
                vars(self),
            )
        if self.ddp_reduce_scatter_with_fp32_accumulation:
            if self.accumulate_allreduce_grads_in_fp32:
                raise LayoutError(
                    "{ddp_reduce_scatter_with_fp32_accumulation:name} is about gradients that are "
                    "sent in bf16: give --grad-reduce-in-bf16 too, or leave it out",
                    vars(self),
                )
            if self.use_torch_fsdp2:
                raise LayoutError(
                    "{ddp_reduce_scatter_with_fp32_accumulation:name} does not go together with "
                    "{use_torch_fsdp2:name}, whose sums are torch's; leave out one",
                    vars(self),
                )
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            raise LayoutError(
                "{overlap_param_gather:name} needs {use_distributed_optimizer:name}: without it "
                "every rank updates all weights and gathers none; give both or neither",
                vars(self),
            )
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise LayoutError(
                "{overlap_param_gather:name} needs {overlap_grad_reduce:name}; leave out one",
                vars(self),
            )

    @property
    def low_precision(self) -> bool:
        """Whether gradients of bf16 weights are added up in bf16, from micro-batch to sum."""
        return not (
            self.accumulate_allreduce_grads_in_fp32
            or self.ddp_reduce_scatter_with_fp32_accumulation
        )


DEFAULT_CONFIG: Final = DataParallelConfig()
"""What holds where nobody says otherwise."""
