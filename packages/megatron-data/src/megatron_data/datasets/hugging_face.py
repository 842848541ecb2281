"""Samples in the names and the convention of Hugging Face's causal language models."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_data.datasets.batches import Sample

IGNORE_INDEX = -100
"""Label that no loss falls on, in torch's cross-entropy and so in these models."""


def hugging_face_inputs(sample: Sample) -> dict[str, NDArray[Any]]:
    """Returns a sample of a `GPTDataset` as `transformers`' causal language models take it.

    They shift the labels themselves: label i is token i, and the loss is that of predicting it from
    the tokens before. So the label of the token after the last is lost, one of `s`, and the
    first is never used.

    Args:
        sample: `tokens`, `labels`, `loss_mask`, `positions` and `document_ids`, each `[s]`.

    Returns:
        int64 `[s]` each: `input_ids`; `labels`, -100 where `loss_mask` is 0; `position_ids`;
        `attention_mask`, 0 on padding.
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
