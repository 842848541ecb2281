"""`megatron-train prove`: layouts that equal one rank, and planted defects that do not."""

import json
import subprocess
import sys

import pytest
from megatron_parallel.testing import WorkerPool
from megatron_train.cli.main import build_parser
from megatron_train.config.described_run import resolve_run
from megatron_train.prove.defects import CATALOGUE
from megatron_train.prove.proof import Proof, prove
from megatron_train.prove.shrink import ShrunkRun, shrink_run

DENSE = (
    *("gpt", "--recipe", "llama-tiny", "--tensor-model-parallel-size", "2"),
    *("--sequence-parallel", "--pipeline-model-parallel-size", "2"),
)
EXPERTS = (
    *("gpt", "--recipe", "deepseek-tiny", "--tensor-model-parallel-size", "2"),
    *("--sequence-parallel", "--pipeline-model-parallel-size", "2"),
    *("--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall"),
)
CONTEXT = (
    *("gpt", "--recipe", "gpt2-124m", "--context-parallel-size", "2", "--world-size", "4"),
    *("--pipeline-model-parallel-size", "2"),
)
LAYOUTS = {
    "experts": EXPERTS,
    "context, tied": CONTEXT,
    "encoder": (
        *("bert", "--recipe", "bert-tiny", "--tensor-model-parallel-size", "2"),
        *("--pipeline-model-parallel-size", "2"),
    ),
    "encoder-decoder": (
        *("t5", "--recipe", "t5-tiny", "--tensor-model-parallel-size", "2"),
        *("--sequence-parallel", "--pipeline-model-parallel-size", "2"),
    ),
    "recurrent": (
        *("mamba", "--recipe", "mamba2-tiny", "--tensor-model-parallel-size", "2"),
        *("--world-size", "4", "--use-distributed-optimizer", "--overlap-param-gather"),
    ),
    "hybrid": ("hybrid", "--recipe", "hybrid-tiny", "--tensor-model-parallel-size", "2"),
    "interleaved": (
        *("gpt", "--recipe", "llama3.2-1b", "--pipeline-model-parallel-size", "2"),
        *("--num-layers-per-virtual-pipeline-stage", "4", "--global-batch-size", "8"),
    ),
    "adapters": (
        *("gpt", "--recipe", "llama-tiny", "--tensor-model-parallel-size", "2"),
        *("--linear-product", "lora"),
    ),
}
DEFECTS = {
    "norms-not-summed": EXPERTS,
    "input-not-summed": EXPERTS,
    "norm-counts-copies": EXPERTS,
    "experts-divided": EXPERTS,
    "experts-in-other-order": EXPERTS,
    "bucket-left-out": EXPERTS,
    "mask-of-next-rank": CONTEXT,
    "tied-not-summed": CONTEXT,
    "mask-of-first-micro-batch": DENSE,
    "micro-batch-not-counted": DENSE,
}


def small(words: tuple[str, ...], steps: int) -> ShrunkRun:
    return shrink_run(resolve_run(build_parser().parse_args(["prove", *words])), steps, 8)


def proof(pool: WorkerPool, words: tuple[str, ...], steps: int, defect: str | None = None) -> Proof:
    return prove(small(words, steps), defect, pool=pool)


def test_a_layout_equals_one_rank_and_a_defect_is_located(worker_pool: WorkerPool) -> None:
    run = small(DENSE, 3)
    seen = []
    right = prove(run, pool=worker_pool, progress=lambda *numbers: seen.append(numbers))
    assert right.equal and right.first is None
    assert right.differences.parameter < 1e-12
    assert seen[-1] == (6, 6)
    wrong = prove(run, "norms-not-summed", pool=worker_pool)
    assert not wrong.equal and wrong.first is not None
    assert (wrong.first.step, wrong.first.what) == (1, "gradient")
    assert wrong.first.ranks and wrong.first.others


@pytest.mark.slow
@pytest.mark.parametrize("words", LAYOUTS.values(), ids=LAYOUTS)
def test_a_recipe_of_each_kind_equals_one_rank(
    worker_pool: WorkerPool, words: tuple[str, ...]
) -> None:
    found = proof(worker_pool, words, 20)
    assert found.equal, found


@pytest.mark.slow
@pytest.mark.parametrize("defect", [each.name for each in CATALOGUE])
def test_every_defect_is_found(worker_pool: WorkerPool, defect: str) -> None:
    found = proof(worker_pool, DEFECTS[defect], 3, defect)
    assert not found.equal and found.first is not None
    if "norm-counts" in defect:
        assert found.first.what == "norm"


@pytest.mark.slow
def test_the_command_ends_with_1_for_a_planted_defect() -> None:
    words = ["prove", "gpt", "--recipe", "llama-tiny", "--world-size", "2", "--steps", "2"]
    command = [sys.executable, "-m", "megatron_train", *words, "--json"]
    right = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert right.returncode == 0, right.stderr
    assert json.loads(right.stdout)["equal"]
    wrong = subprocess.run(
        [*command, "--defect", "bucket-left-out"], capture_output=True, text=True, timeout=300
    )
    assert wrong.returncode == 1, wrong.stderr
    found = json.loads(wrong.stdout)
    assert not found["equal"] and found["first"]["step"] == 1
