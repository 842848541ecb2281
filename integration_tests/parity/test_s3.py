"""Datasets on an S3 server, accessed with s3fs as in a cluster.

moto's server and s3fs need 130 MB of disk, so only `nox -s full` installs them.
"""

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_data import ByteTokenizer, DataError, IndexedDataset, build_gpt_datasets, preprocess
from megatron_data.cli import main
from megatron_data.sources import StorageCache

moto = pytest.importorskip("moto.server", reason="moto's server is not installed")
s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port: int = chosen.getsockname()[1]
        return port


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Returns the file system of a server with an empty bucket."""
    port = free_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=port)
    server.start()
    s3fs.S3FileSystem.clear_instance_cache()
    system = s3fs.S3FileSystem()
    system.mkdir("bucket")
    yield system
    system.rm("bucket", recursive=True)  # moto's buckets belong to the process, not to the server
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def local(bucket: Any, tmp_path: Path) -> str:
    """Returns a dataset on disk, whose copy is in the bucket as `data/d`."""
    (tmp_path / "c.jsonl").write_text(
        "".join(f'{{"text": "document {i} {"sea " * (i % 90)}"}}\n' for i in range(2000))
    )
    bucket.put(str(tmp_path / "c.jsonl"), "bucket/c.jsonl")
    (made,) = preprocess(["s3://bucket/c.jsonl"], tmp_path / "c", ByteTokenizer(), append_eod=True)
    for suffix in (".bin", ".idx", ".meta.json"):
        bucket.put(f"{made.prefix}{suffix}", f"bucket/data/d{suffix}")
    return made.prefix


def test_commands_and_samples_equal_those_of_local_files(
    local: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    option = ["--object-storage-cache-path", str(tmp_path / "cache")]
    for words in (["inspect"], ["verify"], ["mix"], ["trace"]):
        said = []
        for prefix in (local, "s3://bucket/data/d"):
            number = ["9000"] if words == ["trace"] else []
            assert main([*words, prefix, *number, *option]) == 0
            said.append(re.sub(r"[ -]+", " ", capsys.readouterr().out.replace(prefix, "PREFIX")))
        assert said[0] == said[1]
    merged = str(tmp_path / "merged")
    assert main(["merge", "s3://bucket/data/d", local, "--output-prefix", merged, *option]) == 0
    assert Path(f"{merged}.bin").read_bytes() == Path(f"{local}.bin").read_bytes() * 2
    storage = StorageCache(str(tmp_path / "blocks"), 4096, 40_000)
    here = build_gpt_datasets(local, "1,0,0", (100, 0, 0), 256).train
    there = build_gpt_datasets(
        "s3://bucket/data/d", "1,0,0", (100, 0, 0), 256, storage=storage
    ).train
    assert here is not None
    assert there is not None
    for number in range(100):
        assert np.array_equal(here[number]["tokens"], there[number]["tokens"])


def test_missing_and_replaced_files_are_reported(
    local: str, bucket: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    option = ["--object-storage-cache-path", str(tmp_path / "cache")]
    for url in ("s3://bucket/none", "s3://no-bucket/none"):
        assert main(["verify", url, *option]) == 1
        assert re.search(rf"no dataset at {url}: .*preprocess", capsys.readouterr().err)
    with IndexedDataset("s3://bucket/data/d", StorageCache(str(tmp_path / "b"), 4096)) as far:
        far[0]
        content = bytearray(Path(f"{local}.bin").read_bytes())
        content[-1] ^= 1
        bucket.pipe_file("bucket/data/d.bin", bytes(content))
        with pytest.raises(DataError, match="was replaced while it was read"):
            far[len(far) - 1]
        bucket.rm("bucket/data/d.bin")
        with pytest.raises(DataError, match=r"d\.bin does not exist any more"):
            list(far.scan())
