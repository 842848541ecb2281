"""The torch adapter. Skipped if torch is not installed."""

from collections.abc import Callable

import numpy as np
import pytest
from megatron_data import DataError, SequentialSampler, build_gpt_datasets

pytest.importorskip("torch", reason="torch is an extra of this package")

import torch
from megatron_data.torch import CyclicSampler, data_loader, read_batch, to_batch

Write = Callable[..., str]


def test_a_batch_stacks_samples() -> None:
    samples = [
        {"tokens": np.arange(4) + i, "sample_ids": np.asarray(i, np.int64)} for i in range(3)
    ]
    batch = to_batch(samples)
    assert batch["tokens"].shape == (3, 4)
    assert batch["tokens"].dtype == torch.int64
    assert batch["sample_ids"].tolist() == [0, 1, 2]
    read = read_batch(samples, [2, 0])
    assert all(torch.equal(read[name], batch[name][[2, 0]]) for name in batch)
    with pytest.raises(DataError, match="at least one sample"):
        to_batch([])
    with pytest.raises(DataError, match="different keys"):
        to_batch([samples[0], {"tokens": np.arange(4)}])


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_yields_the_batches_of_the_sampler(write_dataset: Write, workers: int) -> None:
    prefix = write_dataset([range(i * 9, i * 9 + 9) for i in range(60)])
    train = build_gpt_datasets(prefix, "100", sequence_length=16).train
    assert train is not None
    sampler = SequentialSampler(len(train), 4, 2, 1, 2)
    batches = list(data_loader(train, sampler, workers=workers))
    expected = list(SequentialSampler(len(train), 4, 2, 1, 2))
    assert [batch["sample_ids"].tolist() for batch in batches] == expected
    np.testing.assert_array_equal(batches[0]["tokens"][1].numpy(), train[expected[0][1]]["tokens"])


def test_torchs_own_loader_reads_batches(write_dataset: Write) -> None:
    """The loader calls `__getitems__`, and default collation returns the same batch."""
    prefix = write_dataset([range(i * 9, i * 9 + 9) for i in range(60)])
    train = build_gpt_datasets(prefix, "100", sequence_length=16).train
    assert train is not None
    sampler = SequentialSampler(len(train), 0, 3)
    loader = torch.utils.data.DataLoader(train, batch_sampler=sampler)  # type: ignore[arg-type]
    for batch, numbers in zip(loader, SequentialSampler(len(train), 0, 3), strict=True):
        expected = read_batch(train, numbers)
        assert batch.keys() == expected.keys()
        assert all(torch.equal(batch[name], expected[name]) for name in batch)


@pytest.mark.parametrize("sharding", [False, True])
def test_a_cyclic_epoch_contains_every_sample_once(sharding: bool) -> None:
    seen = []
    for rank in range(3):
        sampler = CyclicSampler(31, 0, 2, rank, 3, data_sharding=sharding)
        first, second = list(sampler), list(sampler)
        assert len(first) == len(second) == 5
        assert first != second
        seen += [i for batch in first for i in batch]
    assert len(set(seen)) == len(seen) == 30


@pytest.mark.parametrize("sharding", [False, True])
def test_a_cyclic_epoch_resumes_exactly(sharding: bool) -> None:
    for rank in range(2):
        whole = CyclicSampler(23, 0, 3, rank, 2, data_sharding=sharding)
        expected = [*whole, *whole]
        for done in range(1, 6):
            resumed = CyclicSampler(23, done * 6, 3, rank, 2, data_sharding=sharding)
            rest = list(resumed)
            if len(rest) + done < 6:
                rest += list(resumed)
            assert rest == expected[done : done + len(rest)]


def test_cyclic_numbers_by_hand() -> None:
    """Rank 1 of 2, micro-batches of 2, 9 samples: samples 4 to 7 in torch's order of seed 0."""
    order = (torch.randperm(4, generator=torch.Generator().manual_seed(0)) + 4).tolist()
    assert list(CyclicSampler(9, 0, 2, 1, 2)) == [order[:2], order[2:]]
    with pytest.raises(DataError, match="not a whole number of steps; give a multiple of 4"):
        CyclicSampler(9, 3, 2, 1, 2)
    with pytest.raises(DataError, match="one step takes 4"):
        CyclicSampler(3, 0, 2, 1, 2)
    with pytest.raises(DataError, match="data-parallel rank 2 of 2; give 0 to size - 1"):
        CyclicSampler(9, 0, 2, 2, 2)


def test_cyclic_numbers_of_one_order_for_all_ranks_by_hand() -> None:
    """Rank r of 2 takes every second sample of torch's order of the seed of the epoch."""
    for epoch in range(2):
        order = torch.randperm(10, generator=torch.Generator().manual_seed(epoch)).tolist()
        for rank in range(2):
            # 11 samples are 5 micro-batches of 2, of which 2 steps of 2 ranks take 4.
            sampler = CyclicSampler(11, 8 * epoch, 2, rank, 2, data_sharding=False)
            own = order[rank::2]
            assert len(sampler) == 2
            assert list(sampler) == [own[:2], own[2:4]]
            assert sampler.state_dict() == {"consumed_samples": 8 * (epoch + 1)}
            resumed = CyclicSampler(11, 8 * epoch + 4, 2, rank, 2, data_sharding=False)
            assert len(resumed) == 1
            assert list(resumed) == [order[4:][rank::2][:2]]


def test_a_cyclic_sampler_has_one_rank_and_shards_unless_it_is_given_more() -> None:
    assert list(CyclicSampler(5, 0, 2)) == list(CyclicSampler(5, 0, 2, 0, 1, data_sharding=True))
    assert CyclicSampler(9, 0, 2, 1, 2).data_sharding
    assert len(CyclicSampler(4, 0, 2, 0, 2)) == 1  # one step
    sampler = CyclicSampler(9, 0, 2, 1, 2)
    next(iter(sampler))
    assert sampler.state_dict() == {"consumed_samples": 4} and len(sampler) == 1


def test_workers_of_a_loader_stay_and_prefetch_2_batches_unless_asked_otherwise() -> None:
    dataset, sampler = [{"tokens": np.arange(4)}], SequentialSampler(1, 0, 1)

    def settings(**options: int) -> tuple[object, ...]:
        loader = data_loader(dataset, sampler, **options)  # type: ignore[arg-type]
        names = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
        return tuple(getattr(loader, name) for name in names)

    assert settings() == (0, None, False, False)
    assert settings(workers=1) == (1, 2, True, False)
    assert settings(workers=2, prefetch=5, pin_memory=True) == (2, 5, True, True)
