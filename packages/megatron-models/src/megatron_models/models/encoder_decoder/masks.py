"""Masks of the encoder's text: every token attends to all of it except padding."""

import torch
from jaxtyping import Bool, Int
from megatron_kernels import Mask
from torch import Tensor

from megatron_models.errors import ConfigError


def documents(padding: Bool[Tensor, "b t"] | None) -> Int[Tensor, "b t"] | None:
    """Returns the ``document_ids`` of a padding mask: 0 for tokens, -1 for padding."""
    return None if padding is None else -padding.to(torch.int32)


def mask_of_source(
    padding: Bool[Tensor, "b t"] | None,
    source: tuple[int, int] | None,
    target: tuple[int, int],
    device: torch.device,
) -> Mask:
    """Returns the mask of cross-attention.

    Args:
        padding: True for padding of the source; None if there is none.
        source: Sequences and tokens of the encoder's output. None if a cache holds its keys and
            values, to which the padding then belongs.
        target: Sequences and tokens of the queries.
        device: Device of the mask.

    Raises:
        ConfigError: The numbers of sequences differ, or the padding has another shape than the
            source.
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
