"""QK-Clip: factors of the saved weights, and equal runs in every layout."""

import pytest
import torch
from megatron_ckpt import Checkpoint
from megatron_train import read_records

RUN = (
    "pretrain gpt --mock-data --tokenizer-type NullTokenizer --vocab-size 101 --split 9,1,0 "
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --seq-length 16 --lr 1e-2 --micro-batch-size 1 --global-batch-size 4 "
    "--lr-decay-style constant --log-interval 1 --eval-iters 0 --device cpu --no-progress "
    "--float64 --log-layer-outputs --log-max-attention-logit --init-method-std 0.5 "
    "--use-rotary-position-embeddings"
)
CLIP = "--qk-clip --qk-clip-threshold 3 --qk-clip-alpha 0.25"
LAYOUTS = {
    "tp2, distributed": "--nproc-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel",
    "dp2, distributed": "--nproc-per-node 2 --use-distributed-optimizer",
    "pp2": "--nproc-per-node 2 --pipeline-model-parallel-size 2",
    "cp2": "--nproc-per-node 2 --context-parallel-size 2",
    "fully sharded, recomputed": "--nproc-per-node 2 --use-torch-fsdp2 --recompute-granularity "
    "full --recompute-method uniform --recompute-num-layers 1",
}
SLOW = ("pp2", "cp2", "fully sharded, recomputed")


@pytest.fixture(scope="module")
def train(run_command, tmp_path_factory):
    """Returns a function that returns the records of steps and the weights after the last one."""
    here = tmp_path_factory.mktemp("here")

    def run(folder, options="", steps=3):
        run_command(here, f"megatron-train {RUN} {options} --train-iters {steps} --save {folder}")
        checkpoint = Checkpoint(folder / f"iter_{steps:07}")
        weights = {
            name: checkpoint.read_tensor(name)
            for name, record in checkpoint.tensors.items()
            if record.group == "model"
        }
        return read_records(folder / "metrics.jsonl").train, weights

    return run


@pytest.fixture(scope="module")
def one_rank(train, tmp_path_factory):
    return train(tmp_path_factory.mktemp("one"), CLIP)


def test_rows_of_each_group_are_scaled_by_the_factor_of_its_largest_score(train, tmp_path):
    (free,), plain = train(tmp_path / "free", steps=1)
    (bound,), clipped = train(tmp_path / "bound", CLIP, steps=1)
    name = "max attention logit"
    assert free[name] == bound[name] > 3
    gammas = []
    for layer in range(2):
        weight = f"layers.{layer}.attention.qkv.weight"
        ratio = (clipped.pop(weight) / plain.pop(weight)).unflatten(1, (4, 4))  # q q k v
        for group in ratio.unbind():
            gamma = group[0, 0, 0] ** (1 / 0.25)
            gammas.append(float(gamma))
            wanted = torch.stack([gamma**0.25, gamma**0.25, gamma**0.75, gamma**0])
            torch.testing.assert_close(
                group, wanted[:, None, None].expand_as(group), rtol=1e-9, atol=0
            )
    assert min(gammas) == pytest.approx(3 / free[name], rel=1e-9)
    assert all(torch.equal(clipped[each], plain[each]) for each in plain if "qkv" not in each)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in LAYOUTS],
)
def test_every_layout_clips_and_reports_the_same(train, one_rank, layout, tmp_path):
    records, weights = one_rank
    found, sharded = train(tmp_path, f"{CLIP} {LAYOUTS[layout]}")
    for wanted, record in zip(records, found, strict=True):
        numbers = {n: v for n, v in wanted.items() if "output" in n or n == "max attention logit"}
        assert len(numbers) == 9
        for name, value in numbers.items():
            assert record[name] == pytest.approx(value, rel=1e-9), name
    for name, weight in weights.items():
        torch.testing.assert_close(sharded[name], weight, rtol=1e-9, atol=1e-9)
