"""Several ranks save and load together: all succeed or all fail."""

import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from megatron_ckpt import (
    CheckpointError,
    CheckpointStore,
    CorruptCheckpointError,
    DistributedCoordinator,
    View,
)
from megatron_ckpt.coordinator import map_reduce
from safetensors.torch import load_file

WHOLE = torch.arange(24.0).reshape(4, 6)


def columns(rank, size=2, value=WHOLE):
    width = 6 // size
    part = value[:, rank * width : (rank + 1) * width].contiguous()
    return View(part, (4, 6), (0, rank * width), (4, width))


def shared(rank, value=1.0):
    """Returns a tensor of which all ranks have a copy."""
    return View(torch.full((3,), value), (3,), (0,), (3,), rank)


def save(ranks, folder, iteration=1, scale=1.0):
    state = {
        "w": [columns(ranks.rank, value=WHOLE * scale)],
        "norm": [shared(ranks.rank)],
        "n": iteration,
        f"seed.{ranks.rank}": ranks.rank,
    }
    return CheckpointStore(folder, ranks).save(iteration, state)


def test_each_rank_writes_its_own_boxes_and_copies_are_written_once(on_ranks, tmp_path):
    paths = on_ranks(2, lambda ranks: save(ranks, tmp_path))
    assert paths == [CheckpointStore(tmp_path).path(1)] * 2
    first = load_file(paths[0] / "model-00000-of-00002.safetensors")
    second = load_file(paths[0] / "model-00001-of-00002.safetensors")
    assert sorted(first) == ["norm", "w[0:4,0:3]"] and sorted(second) == ["w[0:4,3:6]"]
    assert torch.equal(second["w[0:4,3:6]"], WHOLE[:, 3:])
    back = torch.zeros(4, 6)
    into = {"w": [View.whole(back)], "norm": [View.whole(torch.zeros(3))]}
    values = CheckpointStore(tmp_path).load(None, into)
    assert torch.equal(back, WHOLE)
    assert values == {"n": 1, "seed.0": 0, "seed.1": 1}


def test_ranks_may_hold_different_tensors_when_loading(on_ranks, tmp_path):
    on_ranks(2, lambda ranks: save(ranks, tmp_path))

    def load(ranks):
        tensor = torch.zeros(4, 6) if ranks.rank == 0 else torch.zeros(3)
        name = "w" if ranks.rank == 0 else "norm"
        CheckpointStore(tmp_path, ranks).load(None, {name: [View.whole(tensor)]})
        return tensor

    stage0, stage1 = on_ranks(2, load)
    assert torch.equal(stage0, WHOLE) and torch.equal(stage1, torch.ones(3))

    def lacking(ranks):
        into = {"w": [View.whole(torch.zeros(4, 6))]}
        return CheckpointStore(tmp_path, ranks).load(None, into)

    for error in on_ranks(2, lacking):
        assert isinstance(error, CheckpointError) and "'norm'" in str(error)


def test_a_rank_whose_shard_is_all_padding_has_no_view(on_ranks, tmp_path):
    def padded(ranks):
        views = [View.whole(WHOLE)] if ranks.rank == 0 else []
        CheckpointStore(tmp_path, ranks).save(1, {"w": views, "nothing": []})

    on_ranks(2, padded)

    def load(ranks):
        tensor = torch.zeros(4, 6)
        views = [View.whole(tensor)] if ranks.rank == 1 else []
        return tensor, CheckpointStore(tmp_path, ranks).load(None, {"w": views})

    (_, values), (tensor, _) = on_ranks(2, load)
    assert torch.equal(tensor, WHOLE) and values == {"nothing": []}


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failing_rank_fails_the_save_everywhere_with_its_message(on_ranks, tmp_path, failing):
    on_ranks(2, lambda ranks: save(ranks, tmp_path))

    class Broken(torch.Tensor):
        def detach(self):
            raise OSError(28, "No space left on device")

    def broken(ranks):
        tensor = torch.zeros(4, 3)
        view = columns(ranks.rank)
        if ranks.rank == failing:
            view = view._replace(tensor=tensor.as_subclass(Broken))
        return CheckpointStore(tmp_path, ranks).save(2, {"w": [view]})

    errors = on_ranks(2, broken)
    assert isinstance(errors[failing], OSError)
    said = f"rank {failing}: [Errno 28] No space left on device: "
    file = f"model-0000{failing}-of-00002.safetensors'"
    assert str(errors[1 - failing]).startswith(said) and str(errors[1 - failing]).endswith(file)
    assert CheckpointStore(tmp_path).latest_iteration() == 1
    assert not list(tmp_path.glob("*.tmp-*"))
    on_ranks(2, lambda ranks: save(ranks, tmp_path, 3))
    assert CheckpointStore(tmp_path).latest_iteration() == 3


def test_incomplete_views_are_refused_on_all_ranks_before_writing(on_ranks, tmp_path):
    def states(rank):
        return {
            "ranks 0 and 1 both hold": {"w": [View.whole(WHOLE)]},
            "no rank holds": {"w": [columns(rank, 3)]},
            "on rank 1": {"w": [columns(rank)._replace(tensor=torch.zeros(4, 3 + rank))]}
            | {
                "w": [
                    View(
                        torch.zeros(4, 3).to([torch.float32, torch.float64][rank]),
                        (4, 6),
                        (0, 3 * rank),
                        (4, 3),
                    )
                ]
            },
            "value 'n' differs between ranks 0 and 1": {"n": rank},
            "'x' is a tensor on one rank": {"x": 1 if rank else [View.whole(WHOLE)]},
        }

    for words in states(0):
        call = lambda ranks, words=words: CheckpointStore(tmp_path, ranks).save(  # noqa: E731
            1, states(ranks.rank)[words]
        )
        for error in on_ranks(2, call):
            assert isinstance(error, CheckpointError) and words in str(error), error
    assert not list(tmp_path.glob("iter_*"))


def test_all_ranks_skip_a_damaged_checkpoint_together(on_ranks, tmp_path, caplog):
    on_ranks(2, lambda ranks: save(ranks, tmp_path, 1))
    on_ranks(2, lambda ranks: save(ranks, tmp_path, 2, scale=5.0))
    file = CheckpointStore(tmp_path).path(2) / "model-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

    def load(ranks, iteration=None):
        part = columns(ranks.rank)._replace(tensor=torch.zeros(4, 3))
        into = {"w": [part], "norm": [shared(ranks.rank, 0.0)]}
        return CheckpointStore(tmp_path, ranks).load(iteration, into).iteration, part.tensor

    for rank, (iteration, tensor) in enumerate(on_ranks(2, load)):
        assert iteration == 1
        assert torch.equal(tensor, columns(rank).tensor)
    assert caplog.text.count("skipped") == 1
    for error in on_ranks(2, lambda ranks: load(ranks, 2)):
        assert isinstance(error, CorruptCheckpointError)


def test_a_text_that_rank_0_cannot_read_fails_on_all_ranks(on_ranks):
    def garbled(coordinator):
        gather = coordinator.gather
        coordinator.gather = lambda text: gather(text if coordinator.rank != 1 else "{")
        return map_reduce(coordinator, lambda: None, lambda values: values)

    outcomes = on_ranks(3, garbled)
    assert all(isinstance(outcome, CheckpointError) for outcome in outcomes)
    assert str(outcomes[2]).startswith("rank 0: stored values cannot be read")


def test_ranks_that_fail_for_different_reasons_raise_the_same_error(on_ranks, tmp_path):
    """One rank finds damage, which alone would load the previous checkpoint; another a dtype."""
    for iteration in (1, 2):
        on_ranks(2, lambda ranks, i=iteration: save(ranks, tmp_path, i))
    file = CheckpointStore(tmp_path).path(2) / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")

    def load(ranks):
        dtype = [torch.float64, torch.float32][ranks.rank]
        part = columns(ranks.rank)._replace(tensor=torch.zeros(4, 3, dtype=dtype))
        into = {"w": [part], "norm": [shared(ranks.rank)]}
        return CheckpointStore(tmp_path, ranks).load(None, into)

    errors = on_ranks(2, load)
    assert [type(error) for error in errors] == [CheckpointError] * 2
    assert str(errors[1]) == f"rank 0: {errors[0]}"


RANK = """
    import sys, torch, torch.distributed as dist
    from datetime import timedelta
    from torch.distributed import distributed_c10d
    distributed_c10d._object_to_tensor = distributed_c10d._tensor_to_object = None  # no pickles
    from megatron_ckpt import CheckpointStore, DistributedCoordinator, View
    rank, folder = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2,
                            timeout=timedelta(seconds=60))
    store = CheckpointStore(folder + "/run", DistributedCoordinator())
    part = torch.full((2, 3), float(rank))
    names = ["\u00e9", "much longer than the other name"]
    own = {names[rank]: rank}  # the texts that ranks send have different lengths
    store.save(1, {"w": [View(part, (4, 3), (2 * rank, 0), (2, 3))], "n": 1, **own})
    other = torch.zeros(2, 3)
    values = store.load(None, {"w": [View(other, (4, 3), (2 - 2 * rank, 0), (2, 3))]})
    assert values == {"n": 1, names[0]: 0, names[1]: 1}
    assert (other == 1 - rank).all()
    alone = dist.new_group([1])
    if rank == 1:  # the only rank of the group is its rank 0
        saved = CheckpointStore(folder + "/alone", DistributedCoordinator(alone))
        saved.save(3, {"n": 3})
        assert saved.load(None, {}) == {"n": 3}
    try:
        store.save(2, {"w": [View(part, (4, 3), (0, 0), (2, 3))]})
    except ValueError as error:
        print(error)
    assert store.latest_iteration() == 1
    dist.destroy_process_group()
"""


def test_processes_over_torch_distributed_exchange_no_pickles(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(RANK)]
    runs = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    messages = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert messages[0].startswith("tensor 'w': ranks 0 and 1 both hold [0:2,0:3] as replica 0")
    assert messages[1] == f"rank 0: {messages[0]}"


@pytest.mark.parametrize(
    ("backends", "device"),
    [("cpu:gloo,meta:nccl", "cpu"), ("meta:nccl,cpu:gloo", "cpu"), ("meta:nccl", "meta")],
)
def test_texts_are_exchanged_on_the_cpu_if_the_group_can(monkeypatch, backends, device):
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    found = DistributedCoordinator()._tensor("\u00e9")
    assert (found.device.type, found.numel(), found.dtype) == (device, 2, torch.uint8)
