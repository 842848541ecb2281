"""Where documents begin in a sequence, for operations that pass a state from token to token."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class DocumentNumbers(NamedTuple):
    """Documents of a sequence, counted in order.

    Attributes:
        numbers: `[b, s]`, number of the document of each token, from 0. A padding token has the
            number of the token before it.
        real: `[b, s]`, False for padding.
    """

    numbers: Int[Tensor, "b s"]
    real: Bool[Tensor, "b s"]


def number_documents(ids: Int[Tensor, "b s"]) -> DocumentNumbers:
    """Returns the documents of a sequence, counted in order.

    A document begins at each token whose id differs from that of the token before it. Padding,
    with the id -1, begins no document, and does not divide one.

    Args:
        ids: Document ids, as in `Mask.document_ids`.
    """
    real = ids >= 0
    index = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    last_real = torch.where(real, index, -1).cummax(1).values
    known = ids.gather(1, last_real.clamp(min=0))
    begins = torch.zeros_like(real)
    begins[:, 1:] = real[:, 1:] & (last_real[:, :-1] >= 0) & (ids[:, 1:] != known[:, :-1])
    return DocumentNumbers(begins.cumsum(1), real)


def encode_documents(ids: Int[Tensor, "b s"] | None) -> Int[Tensor, "b s"] | None:
    """Returns one int32 for each token, for kernels: twice its number, and one more for padding.

    Args:
        ids: Document ids, as in `Mask.document_ids`. None means one document, and gives None.
    """
    if ids is None:
        return None
    numbers, real = number_documents(ids)
    return (2 * numbers + ~real).to(torch.int32)
