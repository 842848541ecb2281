"""`megatron-train pretrain {mamba,hybrid}`: falling losses, changed layouts, generated text."""

import math

import pytest
import torch
from megatron_train import read_records
from megatron_train.cli import main

DATA = (
    "--train-data-path train_text_document --valid-data-path valid_text_document "
    "--tokenizer-model tokenizer"
)
SIZES = (
    "--hidden-size 32 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 8 "
    "--mamba-chunk-size 8 --normalization RMSNorm --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --eval-interval 6 "
    "--eval-iters 1 --reset-attention-mask"
)
HYBRID = "--hybrid-override-pattern M*-M --num-attention-heads 4 --ffn-hidden-size 48"
RUNS = {
    "mamba": f"megatron-train pretrain mamba {DATA} {SIZES} --num-layers 2",
    "hybrid": f"megatron-train pretrain hybrid {DATA} {SIZES} {HYBRID}",
}
TP2 = "--nproc-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--nproc-per-node 2 --pipeline-model-parallel-size 2"
CP2 = "--nproc-per-node 2 --context-parallel-size 2"
SMALL = (
    "--hidden-size 48 --mamba-head-dim 12 --mamba-num-groups 2 --mamba-num-heads 8 "
    "--mamba-state-dim 8 --seq-length 32 --micro-batch-size 2 --global-batch-size 4 --no-bf16 "
    "--eval-iters 1 --eval-interval 3 --no-progress --lr 1e-2 --min-lr 0 --train-iters 6 "
    "--lr-decay-iters 6 --lr-warmup-iters 1"
)


def steps(folder):
    records = read_records(folder / "metrics.jsonl").train
    return {record["iteration"]: (record["lm loss"], record["grad_norm"]) for record in records}


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [pytest.param("mamba", (TP2, PP2), marks=pytest.mark.slow), ("hybrid", (PP2, TP2, CP2))],
)
def test_a_run_falls_and_continues_in_other_layouts(corpus, run_command, tmp_path, kind, layouts):
    """Checks in float64 that each layout continues the run of another."""
    iterations = 4 * len(layouts)
    exact = f"{RUNS[kind]} --train-iters {iterations} --float64"
    run_command(corpus, f"{exact} --save {tmp_path}/one")
    for layout, stop in zip(layouts, range(4, iterations + 1, 4), strict=True):
        options = f"--save {tmp_path}/moved --load {tmp_path}/moved --exit-interval {stop}"
        given = exact.replace("M*-M", "M|*-M") if layout == PP2 else exact  # uneven stages
        run_command(corpus, f"{given} {layout} {options}")
    one, moved = steps(tmp_path / "one"), steps(tmp_path / "moved")
    assert moved.keys() == one.keys() == set(range(1, iterations + 1))
    for step, (loss, norm) in one.items():
        assert moved[step] == pytest.approx((loss, norm), abs=1e-9), step
    assert one[iterations][0] < 0.8 * one[1][0]


def test_stages_of_a_pattern_exclude_other_splits(capsys):
    sizes = f"{SIZES} {HYBRID}".replace("M*-M", "M|*-M").replace("--reset-attention-mask", "")
    plan = f"plan hybrid --count {sizes} --vocab-size 64 --world-size 2"
    plan += " --pipeline-model-parallel-size 2"
    assert main(plan.split()) == 0
    capsys.readouterr()
    assert main(f"{plan} --decoder-first-pipeline-num-layers 1".split()) == 1
    error = capsys.readouterr().err
    assert "--decoder-first-pipeline-num-layers has no effect, since the model divides" in error
    assert main(plan.replace("M|*-M", "M|*|-M").split()) == 1
    assert "--hybrid-layer-pattern has 3 pipeline stages, but the layout has 2" in (
        capsys.readouterr().err
    )


@pytest.mark.usefixtures("plain_runs")
@pytest.mark.parametrize(
    "recipe",
    ["mamba2-tiny", pytest.param("mamba2-130m", marks=pytest.mark.slow), "hybrid-tiny"],
)
def test_a_recipe_trains(corpus, recipe, capsys, monkeypatch, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.chdir(corpus)
    kind = recipe.split("-")[0].removesuffix("2")
    sizes = SMALL if kind == "hybrid" else f"{SMALL} --num-layers 2"
    data = "--data-path train_text_document --tokenizer-model tokenizer --split 8,2,0"
    line = f"pretrain {kind} --recipe {recipe} {sizes} {data} --save {tmp_path}/run"
    status = main(line.split())
    torch.set_num_threads(threads)
    assert status == 0, capsys.readouterr().err
    losses = [r["lm loss"] for r in read_records(tmp_path / "run" / "metrics.jsonl").train]
    assert len(losses) == 6 and all(map(math.isfinite, losses)) and losses[-1] < losses[0]


@pytest.fixture(scope="module")
def trained(corpus, run_command, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mamba") / "run"
    run_command(corpus, f"{RUNS['mamba']} --train-iters 6 --eval-iters 0 --save {folder}")
    return folder


def test_commands_work_for_a_recurrent_model(trained, run_command, tmp_path):
    words = "--prompt the --prompt and --max-new-tokens 5 --temperature 0"
    line = f"megatron-infer generate --load {trained} {words}"
    text = run_command(tmp_path, line).stdout
    run_command(tmp_path, f"megatron-ckpt convert --to-hf {trained} {tmp_path}/hf --family mamba2")
    exported = run_command(tmp_path, line.replace(str(trained), f"{tmp_path}/hf")).stdout
    assert exported == text and len(text) > len("the and")
    plan = "megatron-train plan mamba --recipe mamba2-130m --vocab-size 50288 --count"
    assert "128,989,632" in run_command(tmp_path, plan).stdout
