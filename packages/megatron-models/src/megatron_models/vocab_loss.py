"""Cross entropy of one rank's columns of the logits with a chosen backend."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from megatron_kernels import vocab_cross_entropy, vocab_cross_entropy_gradient
from torch import Tensor


@dataclass(frozen=True)
class KernelLogits:
    """A `megatron_parallel.tensor_parallel.LogitsBlock` by one backend of `megatron_kernels`.

    Attributes:
        backend: Backend of `vocab_cross_entropy` and `vocab_cross_entropy_gradient`.
    """

    backend: str

    def forward(
        self, logits: Float[Tensor, "*batch part"], columns: Int[Tensor, "*batch"], valid: int
    ) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
        """Returns log-sum-exp, logit of the target and sum of the logits."""
        return vocab_cross_entropy(logits, columns, valid, backend=self.backend)

    def backward(
        self,
        logits: Float[Tensor, "*batch part"],
        columns: Int[Tensor, "*batch"],
        whole: Float[Tensor, "*batch"],
        upstream: Float[Tensor, "*batch"],
        valid: int,
        *,
        at_target: float,
        everywhere: float,
        overwrites: bool,
    ) -> Float[Tensor, "*batch part"]:
        """Returns the gradient of the logits."""
        tensors = logits, columns, whole, upstream
        options = valid, at_target, everywhere, overwrites
        return vocab_cross_entropy_gradient(*tensors, *options, backend=self.backend)
