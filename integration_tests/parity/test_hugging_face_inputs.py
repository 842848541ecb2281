"""Samples in Hugging Face's convention have the loss of the original sample."""

import numpy as np
import pytest
import torch
from megatron_data import IndexedDatasetBuilder, build_gpt_datasets
from megatron_data.datasets import hugging_face_inputs

transformers = pytest.importorskip("transformers")


CONFIG = transformers.LlamaConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=32,
)


@pytest.fixture
def corpus(tmp_path):
    words = np.random.default_rng(0)
    with IndexedDatasetBuilder(tmp_path / "d", "uint16") as builder:
        for _ in range(20):
            builder.add_item([*words.integers(1, 50, 9), 0])
            builder.end_document()
        builder.finalize()
    return str(tmp_path / "d")


def test_a_transformers_model_computes_the_loss_of_the_sample(corpus):
    train, *_ = build_gpt_datasets(corpus, "1,0,0", (8, 0, 0), 32, eod_id=0, eod_mask_loss=True)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(CONFIG).double().eval()
    for number in range(8):
        sample = train[number]
        inputs = {k: torch.from_numpy(v)[None] for k, v in hugging_face_inputs(sample).items()}
        with torch.no_grad():
            theirs = model(**inputs)
        mask = torch.from_numpy(sample["loss_mask"])[:-1].double()
        assert 0 < mask.sum() < 31  # some labels are masked, which changes the loss
        labels = torch.from_numpy(sample["labels"])[:-1]
        losses = torch.nn.functional.cross_entropy(theirs.logits[0, :-1], labels, reduction="none")
        ours = (losses * mask).sum() / mask.sum()
        assert abs(theirs.loss - ours) < 1e-5  # transformers computes the loss in float32


def examples(prefix: str, consumed_samples: int):
    """Yields the examples that the page passes to `datasets.IterableDataset.from_generator`."""
    train, *_ = build_gpt_datasets(prefix, "1,0,0", (40, 0, 0), 32)
    for number in range(consumed_samples, len(train)):
        yield hugging_face_inputs(train[number])


def test_a_trainer_continues_with_the_remaining_samples(corpus, tmp_path):
    datasets = pytest.importorskip("datasets")

    def losses(consumed_samples: int, **resumed: str) -> list[float]:
        torch.manual_seed(0)
        options = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"),
            max_steps=10,
            per_device_train_batch_size=4,
            lr_scheduler_type="constant",
            learning_rate=1e-2,
            logging_steps=1,
            save_steps=5,
            ignore_data_skip=True,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model=transformers.LlamaForCausalLM(CONFIG),
            args=options,
            train_dataset=datasets.IterableDataset.from_generator(
                examples, gen_kwargs={"prefix": corpus, "consumed_samples": consumed_samples}
            ),
        )
        trainer.train(**resumed)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    whole = losses(0)
    assert len(whole) == 10
    gone_on = losses(20, resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-5"))
    assert gone_on == whole
