"""`megatron-train pretrain gpt --nproc-per-node N`: changed layouts, kills and repetitions."""

import contextlib
import os
import random
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
from megatron_ckpt import find_checkpoint
from megatron_train import read_records

RUN = (
    "megatron-train pretrain gpt --train-data-path train_text_document --valid-data-path "
    "valid_text_document --tokenizer-model tokenizer --num-layers 2 --hidden-size 32 "
    "--num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --global-batch-size 8 "
    "--lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --log-interval 4 --eval-interval 6 "
    "--eval-iters 1"
)
TP2 = "--nproc-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--nproc-per-node 2 --pipeline-model-parallel-size 2"
ZBV2 = f"{PP2} --pipeline-schedule zb-v --pipeline-model-parallel-layout Et||t|L"
DP2 = "--nproc-per-node 2"
CP2 = "--nproc-per-node 2 --context-parallel-size 2 --cp-comm-type p2p a2a --broadcast-batches"
DOCUMENTS = "--reset-attention-mask --micro-batch-size 1"
POOL1 = "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 40"
POOL2 = "--nproc-per-node 2 --hybrid-context-parallel --max-seqlen-per-dp-cp-rank 16"
POOL4 = (
    "--nproc-per-node 4 --context-parallel-size 2 --hybrid-context-parallel "
    "--max-seqlen-per-dp-cp-rank 8 --cp-comm-type p2p a2a"
)
UNTIED = "--untie-embeddings-and-output-weights"
EXPERTS = "--num-experts 4 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"
EP2 = "--nproc-per-node 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
COMBINED = f"{EP2} --overlap-moe-expert-parallel-comm"
TP2_EP2 = f"{TP2} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"


METRICS = "metrics.jsonl"


def steps(folder: Path) -> dict[int, tuple[float, float]]:
    """Returns loss and gradient norm of every step."""
    records = read_records(folder / "metrics.jsonl").train
    return {record["iteration"]: (record["lm loss"], record["grad_norm"]) for record in records}


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        pytest.param("", (TP2, ZBV2, CP2), id="dense"),
        pytest.param("", (TP2, DP2, ZBV2, "", CP2), id="more", marks=pytest.mark.slow),
        pytest.param(DOCUMENTS, (POOL2, DP2, POOL4, "", POOL1), id="pool", marks=pytest.mark.slow),
        pytest.param(
            EXPERTS, (EP2, TP2_EP2, PP2, "", COMBINED), id="experts", marks=pytest.mark.slow
        ),
        pytest.param(
            f"{EXPERTS} --mtp-num-layers 1",
            (TP2, PP2),
            id="multi-token",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            f"--sliding-window 8 {EXPERTS} {UNTIED} --mtp-num-layers 2",
            (EP2, PP2, CP2, TP2),
            id="multi-token-windows",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_changes_its_layout(corpus, run_command, tmp_path, model, layouts):
    """Checks in float64 and with dropout that each layout continues and evaluates another's run."""
    iterations = 2 * len(layouts)
    exact = f"{RUN} {model} --train-iters {iterations} --float64"
    run_command(corpus, f"{exact} --save {tmp_path}/one")
    for layout, stop in zip(layouts, range(2, iterations + 1, 2), strict=True):
        options = f"--save {tmp_path}/moved --load {tmp_path}/moved --exit-interval {stop}"
        run_command(corpus, f"{exact} {layout} {options}")
    one, moved = steps(tmp_path / "one"), steps(tmp_path / "moved")
    assert moved.keys() == one.keys() == set(range(1, iterations + 1))
    for step, (loss, norm) in one.items():
        assert moved[step] == pytest.approx((loss, norm), abs=1e-9), step
    counts = [
        [(r["consumed_samples"], r["tokens"]) for r in read_records(tmp_path / run / METRICS).train]
        for run in ("one", "moved")
    ]
    assert counts[1] == counts[0] == [(8 * n, 8 * 32) for n in range(1, iterations + 1)]
    evaluations = [
        [r["lm loss"] for r in read_records(tmp_path / run / METRICS).validation]
        for run in ("one", "moved")
    ]
    assert evaluations[1] == pytest.approx(evaluations[0], abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TP2, PP2, DP2])
def test_the_same_run_twice_writes_equal_checkpoints(corpus, run_command, tmp_path, layout):
    """Compares ranks of megatron-train and of torchrun by the digests in the manifests."""
    by_torchrun = layout.replace("--nproc-per-node 2", "")
    few, manifests = f"{RUN} --train-iters 5 --eval-iters 0", []
    module = few.replace("megatron-train", "-m megatron_train")
    for name, line in (
        ("first", f"{few} {layout}"),
        ("second", f"torchrun --nproc-per-node 2 {module} {by_torchrun}"),
    ):
        run_command(corpus, f"{line} --save {tmp_path}/{name}")
        checkpoint = find_checkpoint(tmp_path / name)
        checkpoint.verify()
        manifests.append((checkpoint.path / "MANIFEST.json").read_bytes())
    assert manifests[0] == manifests[1]


@pytest.mark.parametrize("kills", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_killed_ranks_continue_bit_for_bit(corpus, run_command, command, preloaded, kills):
    """Kills all processes at random times, every second time during a save."""
    long = f"{RUN} --train-iters {4 * kills + 8} {TP2} --save-interval 1 --keep-last 2"
    whole, killed = corpus / f"whole{kills}", corpus / f"killed{kills}"
    run_command(corpus, f"{long} --save {whole}")
    instants = random.Random(kills)
    for number in range(kills):
        process = preloaded.start(
            command(f"{long} --save {killed} --load {killed}"),
            cwd=corpus,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        wait_for(partial(has_saved, killed, 4 * number + 2), process)
        if number % 2:
            wait_for(partial(is_saving, killed), process)
        else:
            time.sleep(0.2 * instants.random())
        assert process.poll() is None, "the run ended before it could be killed"
        kill_all(process)
    run_command(corpus, f"{long} --save {killed} --load {killed}")
    assert steps(killed) == steps(whole)
    newest = [find_checkpoint(folder).path / "MANIFEST.json" for folder in (whole, killed)]
    assert newest[0].read_bytes() == newest[1].read_bytes()


def has_saved(folder: Path, checkpoints: int) -> bool:
    """Returns whether a run has saved a number of checkpoints."""
    return any(int(path.name[5:12]) >= checkpoints for path in folder.glob("iter_*"))


def is_saving(folder: Path) -> bool:
    """Returns whether a checkpoint is being written."""
    return any(folder.glob("*.tmp-*"))


def wait_for(condition, process: "subprocess.Popen[bytes]") -> None:
    """Waits until the condition is true or the process has ended."""
    deadline = time.monotonic() + 120
    while not condition() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def kill_all(process: "subprocess.Popen[bytes]") -> None:
    """Kills a process and its descendants, children first."""
    for pid in reversed(descendants(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    """Returns the numbers of a process and of all its descendants."""
    found = [pid]
    with contextlib.suppress(FileNotFoundError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += descendants(int(child))
    return found
