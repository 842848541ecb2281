"""One run in a folder: its lock, and the refusal of another run in the same folder."""

import shutil
from pathlib import Path

import pytest
import torch
from megatron_ckpt import find_checkpoint, run_lock
from megatron_data import ByteTokenizer, IndexedDatasetBuilder, train_bpe
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.testing import WorkerPool
from megatron_train import CheckpointConfig, read_records
from megatron_train.cli import main
from megatron_train.mesh_coordinator import coordinator_of
from megatron_train.starting_point import lock_save_folder

TRAIN = (
    "pretrain gpt --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 "
    "--micro-batch-size 2 --train-iters 3 --lr-decay-iters 5 --eval-iters 0 --no-progress "
    "--lr 1e-3 --vocab-size 300 "
    "--num-experts 2 --train-data-path text --tokenizer-model bytes"
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Returns a folder with two corpora, two tokenizers and a run of two steps."""
    folder = tmp_path_factory.mktemp("prepared")
    for name, step in (("text", 1), ("other", 3)):
        with IndexedDatasetBuilder(str(folder / name), "uint16") as builder:
            for start in range(20):
                builder.add_item([*((start + step * i) % 250 for i in range(9)), 256])
                builder.end_document()
            builder.finalize()
    (folder / "moved").mkdir()
    for end in ("bin", "idx"):
        shutil.copy(folder / f"text.{end}", folder / "moved" / f"text.{end}")
    ByteTokenizer().save(folder / "bytes")
    train_bpe(["another one of more tokens"], 260).save(folder / "merged")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(f"{TRAIN} --save run --exit-interval 2".split()) == 0
    return folder


@pytest.fixture
def train(prepared, tmp_path, capsys, monkeypatch):
    """Returns a function that runs the command in a copy of the folder and returns its output."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    shutil.copytree(prepared, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")

    def start(words: str, status: int = 0) -> str:
        capsys.readouterr()
        printed_status = main(words.split())
        printed = capsys.readouterr()
        assert printed_status == status, printed.out + printed.err
        # The warning that these corpora have no manifest is ignored here.
        return "".join(x for x in printed.err.splitlines(True) if ".meta.json" not in x)

    yield start
    torch.set_num_threads(threads)


def contents(folder: str) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def test_a_second_run_in_a_folder_is_refused_during_the_first(train):
    before = contents("run")
    with run_lock("run", "megatron-train pretrain gpt --seed 9"):
        (line,) = train(f"{TRAIN} --save run --load run", status=1).splitlines()
        assert "error: --save run is in use by another run (pid " in line
        assert "UTC: megatron-train pretrain gpt --seed 9)" in line
        assert "another folder" in line
        assert contents("run") == before
        # Readers do not need the lock.
        train(f"{TRAIN} --load run --save elsewhere")
        train("report run")
        assert find_checkpoint("run").iteration == 2
    train(f"{TRAIN} --save run --load run")
    assert find_checkpoint("run").iteration == 3


def test_a_run_holds_the_lock_until_its_last_checkpoint_is_written(train, monkeypatch):
    from megatron_ckpt import CheckpointStore, DirectoryInUseError

    save, seen = CheckpointStore.save, []

    def saved(store, *arguments, **more):
        with (
            pytest.raises(DirectoryInUseError, match="megatron-train pretrain gpt") as refused,
            run_lock("new", timeout=0),
        ):
            pass
        seen.append(refused.value.holder)
        return save(store, *arguments, **more)

    monkeypatch.setattr(CheckpointStore, "save", saved)
    train(f"{TRAIN} --save new")
    assert len(seen) == 1
    with run_lock("new", timeout=0):
        pass


def test_another_run_is_refused_without_a_flag_that_allows_it(train):
    """Checks a sample; megatron-train's test_run_record.py has every setting that is compared."""
    for end in ("bin", "idx"):
        shutil.copy(f"other.{end}", f"text.{end}")
    command = (
        f"{TRAIN} --save run --load run --tokenizer-model merged --moe-aux-loss-coeff 1 "
        "--allow-changed-run"
    )
    before = contents("run")
    kinds = {"data": "content ", "tokenizer": "fingerprint ", "objective": "moe_aux_loss_coeff 0.0"}
    for kind, message in kinds.items():
        others = " ".join(other for other in kinds if other != kind)
        (line,) = train(f"{command} {others}", status=1).splitlines()
        assert "run/iter_0000002 was saved by a run with " in line and message in line, line
        assert f"--allow-changed-run {kind} to continue with the new one" in line
    assert contents("run") == before
    lines = train(f"{command} {' '.join(kinds)}").splitlines()
    assert len(lines) == 3 and all("warning: " in line for line in lines)
    assert [r["iteration"] for r in read_records(Path("run/metrics.jsonl")).train] == [1, 2, 3]


def test_paths_length_and_logging_may_differ_and_rates_with_a_warning(train):
    words = "--train-data-path moved/text --train-iters 4 --log-interval 1 --save-interval 1"
    assert train(f"{TRAIN} --save run --load run {words}") == ""
    (line,) = train(f"{TRAIN} --load run --train-iters 5 --lr 1e-2").splitlines()
    assert (
        "settings of the optimizer differ from those before step 4: lr 0.001 in the checkpoint "
        "and 0.01 in this run" in line
    )


def hold(mesh: Mesh, folder: str) -> str:
    try:
        with lock_save_folder(CheckpointConfig(save=folder), coordinator_of(mesh), "train"):
            return "held"
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


def test_all_ranks_are_refused_if_rank_0_is(worker_pool: WorkerPool, tmp_path):
    assert worker_pool.run_mesh(ParallelLayout(dp=2), hold, str(tmp_path)) == ["held", "held"]
    with run_lock(tmp_path, "another"):
        first, second = worker_pool.run_mesh(ParallelLayout(dp=2), hold, str(tmp_path))
    assert first.startswith(f"TrainError: --save {tmp_path} is in use by another run (pid ")
    assert second == first.replace("TrainError: ", "CheckpointError: rank 0: ")
