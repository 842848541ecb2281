"""One rank of each model replica opens the corpus; all ranks get the same batches as otherwise."""

import sys
from pathlib import Path

import pytest
import torch
from megatron_data import DataError, IndexedDatasetBuilder
from megatron_models import GPTConfig
from megatron_optim import OptimizerConfig
from megatron_parallel import Mesh, ParallelLayout
from megatron_train import DataConfig, EvaluationConfig, RunConfig, TrainError, TrainingConfig
from megatron_train.batches import RunBatches
from megatron_train.broadcast_batches import Batches, open_batches
from megatron_train.tasks.gpt_kind import TASK


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    """Returns the prefix of a corpus of 60 documents with tokens below 250."""
    prefix = str(tmp_path_factory.mktemp("text") / "text")
    with IndexedDatasetBuilder(prefix, "uint16") as builder:
        for start in range(60):
            builder.add_item([*((start + i) % 250 for i in range(9)), 249])
            builder.end_document()
        builder.finalize()
    return prefix


def run_of(text: str, layout: ParallelLayout, vocab_size: int = 250) -> RunConfig:
    return RunConfig(
        model=GPTConfig(
            num_layers=2,
            hidden_size=8,
            num_attention_heads=2,
            vocab_size=vocab_size,
            max_position_embeddings=16,
        ),
        data=DataConfig(seq_length=16, data_path=(text,), split="6,3,1", broadcast_batches=True),
        training=TrainingConfig(train_iters=3, micro_batch_size=2, global_batch_size=8),
        optimizer=OptimizerConfig(lr=1e-4),
        evaluation=EvaluationConfig(eval_iters=1),
        layout=layout,
    )


def everything(batches: Batches) -> list[list[dict[str, torch.Tensor]]]:
    """Returns the batches of training from step 2 on, of an evaluation in between and a test."""
    steps = []
    for step in batches.training(8):
        steps.append(step)
        steps.extend(batches.validation())
    steps.extend(batches.testing())
    return [
        [{**batch.fields, "counted": torch.tensor([batch.samples, batch.tokens])} for batch in step]
        for step in steps
    ]


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


LAYOUTS = [
    ParallelLayout(tp=2, dp=2),
    pytest.param(ParallelLayout(tp=2, pp=2, dp=2), marks=pytest.mark.slow),
    ParallelLayout(cp=2, pp=2, dp=1),
    pytest.param(ParallelLayout(tp=2, cp=2, pp=2, dp=1), marks=pytest.mark.slow),
    pytest.param(
        ParallelLayout(tp=2, cp=2, pp=2, dp=1, order="pp-cp-tp-ep-dp"), marks=pytest.mark.slow
    ),
]


@pytest.mark.skipif(sys.platform != "linux", reason="mapped files are read from /proc")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_one_rank_opens_the_corpus_and_all_have_it(worker_pool, text, layout):
    def run(mesh: Mesh) -> tuple[tuple[int, ...], bool, bool]:
        config = run_of(text, layout)
        shared = open_batches(config, lambda: TASK.open_data(config, None), mesh)
        found = everything(shared)
        opened = text in Path("/proc/self/maps").read_text()
        alone = RunBatches(config, TASK.open_data(config, None), mesh.axis("dp"))
        expected = everything(alone)
        assert (
            (shared.has_test, shared.no_test_reason)
            == (alone.has_test, alone.no_test_reason)
            == (True, "")
        )
        assert len(found) == len(expected) == 2 + 2 + 1
        same = all(
            list(a) == list(b) and all(equal(a[name], b[name]) for name in a)
            for ours, theirs in zip(found, expected, strict=True)
            for a, b in zip(ours, theirs, strict=True)
        )
        return mesh.layout.coordinates(mesh.rank), opened, same

    ranks = worker_pool.run_mesh(layout, run)
    assert all(same for _, _, same in ranks)
    for place, opened, _ in ranks:
        assert opened == (place.tp == place.cp == place.pp == 0)


def opened(config: RunConfig, mesh: Mesh) -> Batches:
    return open_batches(config, lambda: TASK.open_data(config, None), mesh)


def test_an_error_of_the_reading_rank_is_that_of_all(worker_pool, text):
    def run(mesh: Mesh) -> tuple[str, str]:
        with pytest.raises((DataError, TrainError)) as missing:
            opened(run_of(text + "s", mesh.layout), mesh)
        batches = opened(run_of(text, mesh.layout, vocab_size=100), mesh)
        with pytest.raises((DataError, TrainError)) as unknown:
            everything(batches)
        return str(missing.value), str(unknown.value)

    first, *others = worker_pool.run_mesh(ParallelLayout(tp=2, pp=2, dp=1), run)
    assert "texts" in first[0]
    assert first[1].startswith("the corpus holds token 249, but the vocabulary has 100")
    assert others == [first] * 3
