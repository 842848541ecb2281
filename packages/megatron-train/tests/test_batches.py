"""Batches of small corpora: which splits may be empty, and what a run says of them."""

import pytest
from megatron_data import EmptySplitError, IndexedDatasetBuilder
from megatron_models import GPTConfig
from megatron_optim import OptimizerConfig
from megatron_parallel import Mesh
from megatron_train import DataConfig, EvaluationConfig, RunConfig, TrainError, TrainingConfig
from megatron_train.batches import RunBatches
from megatron_train.tasks.gpt_kind import TASK


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Returns the prefixes of a corpus of 20 documents, and of one without documents."""
    prefixes = []
    for name, documents in (("text", 20), ("nothing", 0)):
        prefixes.append(str(tmp_path_factory.mktemp(name) / name))
        with IndexedDatasetBuilder(prefixes[-1], "uint16") as builder:
            for start in range(documents):
                builder.add_item([start + i for i in range(9)])
                builder.end_document()
            builder.finalize()
    return prefixes


def batches(eval_iters=1, **data):
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    config = RunConfig(
        model=GPTConfig(**sizes, vocab_size=40, max_position_embeddings=8),
        data=DataConfig(seq_length=8, num_workers=0, **data),
        training=TrainingConfig(train_iters=3, micro_batch_size=2, global_batch_size=4),
        optimizer=OptimizerConfig(lr=1e-4),
        evaluation=EvaluationConfig(eval_iters=eval_iters),
    )
    return RunBatches(config, TASK.open_data(config, None), Mesh.single().axis("dp"))


def number(steps):
    return [len(step) for step in steps]


def test_every_split_has_its_steps(corpora):
    found = batches(data_path=corpora[:1], split="6,2,2")
    assert number(found.training(0)) == [2, 2, 2] and number(found.training(8)) == [2]
    assert number(found.validation()) == number(found.testing()) == [2]
    assert found.has_test and found.no_test_reason == ""


def test_an_empty_test_split_is_no_error(corpora):
    found = batches(data_path=corpora[:1], split="85,14,1")
    assert not found.has_test and "holds no" in found.no_test_reason
    assert number(found.testing()) == [] and number(found.validation()) == [2]
    assert batches(data_path=corpora[:1], split="8,2,0").no_test_reason == ""


def test_an_empty_validation_split_is_refused_unless_nothing_is_evaluated(corpora):
    empty = {"data_path": corpora[:1], "split": "85,1,14"}
    with pytest.raises(TrainError, match=r"holds no .*; enlarge it, .* with --eval-iters 0$"):
        batches(**empty)
    assert number(batches(eval_iters=0, **empty).validation()) == []
    with pytest.raises(TrainError, match=r"--split leaves nothing to validate on; .* --eval-iters"):
        batches(data_path=corpora[:1], split="8,0,2")
    assert number(batches(eval_iters=0, data_path=corpora[:1], split="8,0,2").validation()) == []
    with pytest.raises(TrainError, match=r"--split leaves nothing to train on; give it a weight$"):
        batches(data_path=corpora[:1], split="0,8,2")


def test_an_empty_corpus_for_the_test_is_refused(corpora):
    text, nothing = corpora
    paths = {"train_data_path": (text,), "valid_data_path": (text,)}
    with pytest.raises(EmptySplitError, match="request 0 samples"):
        batches(**paths, test_data_path=(nothing,))
    found = batches(**paths, test_data_path=(text,))
    assert found.has_test and number(found.testing()) == [2]
