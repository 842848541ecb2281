"""Samples in Hugging Face's convention have the loss of the sample itself."""

import numpy as np
import pytest
import torch
from megatron_data import (
    IndexedDatasetBuilder,
    build_gpt_datasets,
    hugging_face_inputs,
)

transformers = pytest.importorskip("transformers")


def test_a_transformers_model_takes_the_loss_that_the_sample_asks_for(tmp_path):
    words = np.random.default_rng(0)
    with IndexedDatasetBuilder(tmp_path / "d", "uint16") as builder:
        for _ in range(20):
            builder.add_item([*words.integers(1, 50, 9), 0])
            builder.end_document()
        builder.finalize()
    train, *_ = build_gpt_datasets(
        str(tmp_path / "d"), "1,0,0", (8, 0, 0), 32, eod_id=0, eod_mask_loss=True
    )
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double().eval()
    for number in range(8):
        sample = train[number]
        inputs = {k: torch.from_numpy(v)[None] for k, v in hugging_face_inputs(sample).items()}
        with torch.no_grad():
            theirs = model(**inputs)
        mask = torch.from_numpy(sample["loss_mask"])[:-1].double()
        assert 0 < mask.sum() < 31  # some labels do not count, and here they show
        labels = torch.from_numpy(sample["labels"])[:-1]
        losses = torch.nn.functional.cross_entropy(theirs.logits[0, :-1], labels, reduction="none")
        ours = (losses * mask).sum() / mask.sum()
        assert abs(theirs.loss - ours) < 1e-5  # they take the loss in float32
