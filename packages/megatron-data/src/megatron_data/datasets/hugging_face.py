"""Samples as inputs of Hugging Face's causal language models."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_data.datasets.batches import Sample

IGNORE_INDEX = -100
"""Label that torch's cross-entropy ignores."""


def hugging_face_inputs(sample: Sample) -> dict[str, NDArray[Any]]:
    """Converts a sample of a `GPTDataset` to inputs of a causal language model of `transformers`.

    These models shift labels themselves: label i is token i, predicted from the tokens before it.
    The last label of the sample is therefore lost, and the first label of the result is not used.

    Args:
        sample: `tokens`, `labels`, `loss_mask`, `positions` and `document_ids`, each `[s]`.

    Returns:
        int64 `[s]` each: `input_ids`; `labels`, -100 where `loss_mask` is 0; `position_ids`;
        `attention_mask`, 0 for padding.
    """
    labels = np.full_like(sample["labels"], IGNORE_INDEX)
    counts = sample["loss_mask"][:-1] > 0
    labels[1:][counts] = sample["labels"][:-1][counts]
    return {
        "input_ids": sample["tokens"],
        "labels": labels,
        "position_ids": sample["positions"].astype(np.int64),
        "attention_mask": (sample["document_ids"] >= 0).astype(np.int64),
    }
