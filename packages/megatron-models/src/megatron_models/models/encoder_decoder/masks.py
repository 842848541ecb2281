"""Who may attend to the encoder's text: everybody to all of it but its padding."""

import torch
from jaxtyping import Bool, Int
from megatron_kernels import Mask
from torch import Tensor

from megatron_models.errors import ConfigError


def documents(padding: Bool[Tensor, "b t"] | None) -> Int[Tensor, "b t"] | None:
    """Returns padding as the mask contract has it: documents 0, and -1 where there is none."""
    return None if padding is None else -padding.to(torch.int32)


def mask_of_source(
    padding: Bool[Tensor, "b t"] | None,
    source: tuple[int, int] | None,
    target: tuple[int, int],
    device: torch.device,
) -> Mask:
    """Returns the mask of cross-attention.

    Args:
        padding: where the source is padding; None if none is.
        source: sequences and tokens of the encoder's output. None where a cache has seen it: the
            padding is then that of what was seen.
        target: sequences and tokens that attend.
        device: of the mask.

    Raises:
        ConfigError: the numbers of sequences differ, or the padding is of another text.
    """
    batch, queries = target
    if source is not None and source[0] != batch:
        raise ConfigError(f"the target has {batch} sequences and the source {source[0]}")
    if padding is None:
        return Mask(causal=False)
    keys = padding.shape[-1] if source is None else source[1]
    if tuple(padding.shape) != (batch, keys):
        raise ConfigError(
            f"source_padding is {list(padding.shape)} for a source of {[batch, keys]}"
        )
    text = torch.zeros(batch, queries, dtype=torch.int32, device=padding.device)
    mask = Mask(causal=False, document_ids=documents(padding), query_document_ids=text)
    return mask.prepare(queries, keys, device=device)
