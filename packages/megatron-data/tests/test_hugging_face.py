"""Inputs of Hugging Face models against a hand-computed sample."""

import numpy as np
from megatron_data.datasets import Sample, hugging_face_inputs


def test_labels_are_at_the_index_of_their_tokens() -> None:
    sample: Sample = {
        "tokens": np.array([5, 6, 0, 7, 0]),
        "labels": np.array([6, 0, 7, 8, 0]),
        "loss_mask": np.array([1, 1, 0, 1, 0], np.float32),
        "positions": np.array([0, 1, 2, 0, 1], np.int32),
        "document_ids": np.array([0, 0, 0, 1, -1], np.int32),
        "sample_ids": np.asarray(3),
    }
    inputs = hugging_face_inputs(sample)
    assert {name: value.tolist() for name, value in inputs.items()} == {
        "input_ids": [5, 6, 0, 7, 0],
        "labels": [-100, 6, 0, -100, 8],
        "position_ids": [0, 1, 2, 0, 1],
        "attention_mask": [1, 1, 1, 1, 0],
    }
    assert {value.dtype for value in inputs.values()} == {np.dtype(np.int64)}
    assert sample["labels"].tolist() == [6, 0, 7, 8, 0]
