"""What a load reads from the disk: which bytes, in which order, and whether they are compared."""

import pytest
import torch
from megatron_ckpt import Checkpoint, CheckpointStore, CorruptCheckpointError, View
from megatron_ckpt.store import blocks
from megatron_ckpt.store.blocks import BlockReader, write_file

from .test_store_limits import opened, save


@pytest.fixture
def reads(monkeypatch):
    """Returns the start and length of each read of a file, in their order."""
    found, read = [], blocks.read_into

    def record(descriptor, buffer, start):
        found.append((start, len(buffer)))
        return read(descriptor, buffer, start)

    monkeypatch.setattr(blocks, "read_into", record)
    return found


def saved(folder, **tensors):
    state = {name: [View.whole(tensor)] for name, tensor in tensors.items()}
    return Checkpoint(CheckpointStore(folder).save(1, state))


def test_a_block_is_read_alone_and_refused_each_time_if_it_is_damaged(tmp_path, small_blocks):
    data = bytes(number % 251 for number in range(700))
    record = write_file(tmp_path / "a", data)
    before = opened()
    with BlockReader(tmp_path, "a", record) as reader:
        assert bytes(reader.view(300, 5)) == data[300:305]
    (tmp_path / "a").write_bytes(data[:300] + b"x" + data[301:])
    with BlockReader(tmp_path, "a", record) as reader:
        for _ in range(2):
            with pytest.raises(CorruptCheckpointError, match="bytes 256 to 512 changed"):
                reader.view(260, 5)
        assert opened() == before + 1
    assert opened() == before


READERS = {
    "one tensor": lambda checkpoint, into: checkpoint.read_tensor("w"),
    "tensors": lambda checkpoint, into: checkpoint.load_tensors(into),
    "all": lambda checkpoint, into: checkpoint.load(into, groups=["model"]),
    "a folder": lambda checkpoint, into: checkpoint.verified_folder("deep"),
}


@pytest.mark.parametrize("reader", READERS)
def test_digests_are_compared_by_default(tmp_path, reader):
    checkpoint = Checkpoint(save(tmp_path, files={"deep/notes": b"notes"}))
    into = {"w": [View.whole(torch.zeros(2, 3))]}
    READERS[reader](checkpoint, into)
    for name in ("model-00000-of-00001.safetensors", "deep/notes"):
        content = (checkpoint.path / name).read_bytes()
        (checkpoint.path / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CorruptCheckpointError, match="digest differs"):
        READERS[reader](checkpoint, into)


def test_pieces_are_read_in_the_order_of_their_file(tmp_path, reads):
    checkpoint = saved(tmp_path, a=torch.ones(3), b=torch.ones(3), c=torch.ones(3))
    into = {name: [View.whole(torch.zeros(3))] for name in "bca"}
    checkpoint.load_tensors(into, verify=False)
    starts = [start for start, _ in reads]
    assert len(starts) == 3 and starts == sorted(starts)


def test_rows_are_read_together_up_to_the_size_of_a_read(tmp_path, small_blocks, reads):
    """Rows of 16 bytes; a read has at most 96, and ends with its block of 256."""
    tensor, back = torch.arange(128.0).reshape(32, 4), torch.zeros(32, 4)
    saved(tmp_path, w=tensor).load_tensors({"w": [View.whole(back)]}, verify=False)
    assert torch.equal(back, tensor)
    lengths = [length for _, length in reads]
    assert sum(lengths) == 512 and max(lengths) == 96 and len(lengths) < 12


def test_columns_of_long_rows_are_read_alone(tmp_path, small_blocks, reads):
    """Rows of 24 bytes are long here, so that two of their six numbers are read."""
    tensor, part = torch.arange(60.0).reshape(10, 6), torch.zeros(4, 2)
    into = {"w": [View(part, (10, 6), (1, 1), (4, 2))]}
    saved(tmp_path, w=tensor).load_tensors(into, verify=False)
    assert torch.equal(part, tensor[1:5, 1:3])
    assert [length for _, length in reads] == [8] * 4
