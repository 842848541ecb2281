"""Batches of small corpora: the steps, their reading, and which splits may be empty."""

import threading
from types import SimpleNamespace

import pytest
import torch
from megatron_data import ByteTokenizer, Datasets, EmptySplitError, IndexedDatasetBuilder
from megatron_models import GPTConfig
from megatron_optim import OptimizerConfig
from megatron_parallel import Mesh, ParallelLayout
from megatron_train import DataConfig, EvaluationConfig, RunConfig, TrainError, TrainingConfig
from megatron_train.batches import RunBatches
from megatron_train.broadcast_batches import BroadcastBatches, open_batches
from megatron_train.tasks.gpt_kind import TASK
from megatron_train.tasks.task import MicroBatch


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


def run(eval_iters=1, training=(), vocab_size=40, layout=None, **data):
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    steps = {"train_iters": 3, "micro_batch_size": 2, "global_batch_size": 4, **dict(training)}
    return RunConfig(
        model=GPTConfig(**sizes, vocab_size=vocab_size, max_position_embeddings=8),
        data=DataConfig(seq_length=8, **{"num_workers": 0, **data}),
        training=TrainingConfig(**steps),
        optimizer=OptimizerConfig(lr=1e-4),
        evaluation=EvaluationConfig(eval_iters=eval_iters),
        **({} if layout is None else {"layout": layout}),
    )


def batches(eval_iters=1, **data):
    config = run(eval_iters, **data)
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


def test_steps_grow_with_the_samples_consumed():
    """A step has 2 samples until 4 are consumed, and 4 from then on."""
    training = {"rampup_batch_size": (2, 2, 4), "train_iters": None, "train_samples": 8}
    found = batches(training=training, mock_data=True)
    for consumed, sizes in ((0, [1, 1, 2]), (2, [1, 2]), (4, [2]), (8, [])):
        assert number(found.training(consumed)) == sizes
    assert number(found.validation()) == number(found.testing()) == [2]
    assert number(batches(3, mock_data=True).validation()) == [2, 2, 2]
    ids = [b.fields["sample_ids"].tolist() for step in found.training(0) for b in step]
    assert ids == [[0, 1], [2, 3], [4, 5], [6, 7]]
    for steps in (found.validation(), found.testing()):  # from the first sample on
        ids = [b.fields["sample_ids"].tolist() for step in steps for b in step]
        assert ids == [[0, 1], [2, 3]]


class Numbers:
    """A source of samples that records who reads them."""

    def __init__(self):
        self.readers, self.third = set(), threading.Event()
        self.sizes, self.checks = [], 0

    def datasets(self, sizes):
        self.sizes.append(tuple(sizes))
        return Datasets(*(range(size) if size else None for size in sizes))

    def check(self):
        self.checks += 1

    def read(self, dataset, samples):
        self.readers.add(threading.current_thread())
        if 8 in samples:
            self.third.set()
        return {"tokens": torch.tensor([[dataset[i]] for i in samples])}

    def micro_batch(self, fields):
        return MicroBatch.from_fields(fields, "tokens")


def test_each_split_is_opened_for_its_samples_and_corpora_are_checked_once():
    data = Numbers()
    RunBatches(run(2, mock_data=True), data, Mesh.single().axis("dp"))
    assert data.sizes == [(12, 0, 0), (0, 8, 0), (0, 0, 8)] and data.checks == 1


def test_a_thread_reads_as_many_steps_ahead_as_the_run_asks_for():
    data = Numbers()
    steps = RunBatches(run(num_workers=2, mock_data=True), data, Mesh.single().axis("dp"))
    own, here = steps.training(0), threading.current_thread()
    next(own)
    assert data.third.wait(60) and here not in data.readers
    assert len(list(own)) == 2
    data = Numbers()
    steps = RunBatches(run(num_workers=0, mock_data=True), data, Mesh.single().axis("dp"))
    next(steps.training(0))
    assert data.readers == {here} and not data.third.is_set()


def test_a_pool_gets_the_samples_of_each_step_in_the_thread_of_the_run():
    """A pool communicates, which a thread must not do."""
    data, asked = Numbers(), []

    def rows(read, numbers):
        asked.append(numbers)
        return [MicroBatch(read([each]), 1, 1) for each in numbers]

    config, axis = run(2, num_workers=2, mock_data=True), Mesh.single().axis("dp")
    found = RunBatches(config, data, axis, SimpleNamespace(rows=rows))
    assert [len(step) for step in found.training(4)] == [4, 4]
    assert asked == [range(4, 8), range(8, 12)]
    assert [len(step) for step in found.validation()] == [4, 4]
    assert [len(step) for step in found.testing()] == [4, 4]
    assert data.readers == {threading.current_thread()}


def test_a_run_with_a_pool_has_rows_of_at_most_its_length(corpora):
    training = {"max_seqlen_per_dp_cp_rank": 16, "micro_batch_size": 1}
    layout, lines = ParallelLayout(dp=1, hybrid_cp=True), []
    words = {"tokenizer_type": "ByteTokenizer", "reset_attention_mask": True}
    config = run(0, training, 257, layout, data_path=corpora[:1], split="1,0,0", **words)
    mesh = Mesh(layout, 0)
    found = open_batches(
        config, lambda: TASK.open_data(config, ByteTokenizer()), mesh, lines.append
    )
    steps = list(found.training(0))
    assert [sum(row.samples for row in step) for step in steps] == [4, 4, 4]
    lengths = [row.fields["tokens"].shape[1] for step in steps for row in step]
    assert max(lengths) == 16 and len(lines) == 1
    assert all(row.context_split.length <= 16 for step in steps for row in step)


class Source:
    """Batches of two steps, the second of which cannot be read."""

    has_test, no_test_reason = False, "no text"

    def training(self, consumed):
        first = {"tokens": torch.full((2, 3), consumed), "loss mask of 1": torch.ones(2, 3)}
        second = {"tokens": torch.tensor([[consumed, 9]])}
        yield [MicroBatch(first, 2, 6), MicroBatch(second, 1, 2)]

    def validation(self):
        yield [MicroBatch({"tokens": torch.tensor([[1]])}, 1, 1)]
        raise SourceError("a sample is damaged")

    def testing(self):
        return iter(())


class SourceError(ValueError):
    """An error of a source."""


def test_a_rank_hears_the_steps_of_the_reading_rank_and_its_error(monkeypatch):
    """The second of two tensor-parallel ranks gets what the first has sent before."""

    class Nameless(Source):
        def testing(self):
            yield from ()
            raise SourceError

    sent = []

    def send(tensors, axis, *, device, purpose):
        if axis.name == "pp":
            sent.append(dict(tensors))
        return tensors

    monkeypatch.setattr("megatron_train.broadcast_batches.broadcast_tensors", send)
    reader = BroadcastBatches(Mesh.single(), Nameless)
    assert len(list(reader.training(5))) == 1
    for read in (lambda: list(reader.validation()), reader.testing):
        with pytest.raises(SourceError):
            next(iter(read()))
    messages = iter(sent)

    def hear(tensors, axis, *, device, purpose):
        if axis.name == "pp":
            return tensors
        assert tensors == {}
        return next(messages)

    monkeypatch.setattr("megatron_train.broadcast_batches.broadcast_tensors", hear)
    mesh = Mesh(ParallelLayout(tp=2, dp=1), 1)
    other = BroadcastBatches(mesh, lambda: pytest.fail("it does not read"))
    assert (other.has_test, other.no_test_reason) == (False, "no text")
    (step,) = other.training(5)
    (theirs,) = Source().training(5)
    assert [(b.samples, b.tokens) for b in step] == [(2, 6), (1, 2)]
    for one, same in zip(step, theirs, strict=True):
        assert one.fields.keys() == same.fields.keys()
        assert all(torch.equal(one.fields[name], same.fields[name]) for name in one.fields)
    steps = other.validation()
    assert number([next(steps)]) == [1]
    with pytest.raises(TrainError, match=r"^a sample is damaged$"):
        next(steps)
    with pytest.raises(TrainError, match=r"^SourceError$"):
        next(other.testing())
    assert next(messages, None) is None


def test_broadcast_batches_are_those_of_the_reading_rank():
    shared, source = BroadcastBatches(Mesh.single(), Source), Source()
    assert (shared.has_test, shared.no_test_reason) == (False, "no text")
    (ours,), (theirs,) = shared.training(5), source.training(5)
    assert [(b.samples, b.tokens) for b in ours] == [(2, 6), (1, 2)]
    for one, other in zip(ours, theirs, strict=True):
        assert one.fields.keys() == other.fields.keys()
        assert all(torch.equal(one.fields[name], other.fields[name]) for name in one.fields)
    assert list(shared.testing()) == []
    steps = shared.validation()
    assert number([next(steps)]) == [1]
    with pytest.raises(SourceError, match="a sample is damaged"):
        next(steps)
