"""Settings of data parallelism, with Megatron-LM's names. Nothing here imports torch."""

from dataclasses import dataclass, field
from typing import Any, Final

from megatron_parallel.layout import LayoutError

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
    ddp_bucket_size: int = field(
        default=BUCKET_SIZE,
        metadata=_flag(
            "--ddp-bucket-size", "elements of a bucket of gradients, at most", unit="elements"
        ),
    )

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


DEFAULTS: Final = DataParallelConfig()
"""What holds where nobody says otherwise."""
