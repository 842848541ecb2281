"""A task from another distribution, `stranger/`: `megatron-train pretrain bidirectional`.

No file of the eight packages mentions it. Runs with tensor and pipeline parallelism equal those of
one rank in float64, and a run can change its layout.
"""

import random
import re
from pathlib import Path

import pytest
import torch
import yaml
from megatron_ckpt import CheckpointStore
from megatron_data import IndexedDatasetBuilder
from megatron_data.tokenizers import bert_tokenizer
from megatron_optim import Optimizer, OptimizerConfig, find_rule
from megatron_parallel import Mesh, Sharding, TrainableParameters
from megatron_parallel.testing import WorkerPool
from megatron_train import read_records
from megatron_train.cli import main
from megatron_train.cli.main import build_parser
from megatron_train.config.described_run import resolve_run
from megatron_train.prove.proof import prove
from megatron_train.prove.shrink import shrink_run
from torch import nn

pytest.importorskip("bidirectional", reason="pip install -e integration_tests/stranger")

WORDS = ["cat", "dog", "bird", "saw", "big", "small", "red", "ran", "sat", "mat", "tree", "then"]
RUN = (
    "megatron-train pretrain bidirectional --train-data-path text --valid-data-path text "
    "--tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt --masked-lm-head "
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 24 --micro-batch-size 2 "
    "--global-batch-size 4 --lr 1e-2 --eval-interval 3 --eval-iters 1 --log-interval 3 --float64"
)
OWN = "--optimizer rmsprop --center-inputs --linear-product scaled --scaled-start 0.8"
"""Flags for the update rule, the state and the product of the same distribution."""
TP2 = "--nproc-per-node 2 --tensor-model-parallel-size 2"
PP2 = "--nproc-per-node 2 --pipeline-model-parallel-size 2"


@pytest.fixture(scope="module")
def sentences(tmp_path_factory) -> Path:
    """Returns a folder with a corpus of sentences and their vocabulary."""
    folder = tmp_path_factory.mktemp("sentences")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    tokenizer, draw = bert_tokenizer(folder / "vocab.txt"), random.Random(1)
    with IndexedDatasetBuilder(folder / "text", "uint16") as builder:
        for _ in range(20):
            for _ in range(draw.randint(2, 5)):
                builder.add_item(tokenizer.encode(" ".join(draw.choices(WORDS, k=9))))
            builder.end_document()
        builder.finalize()
    return folder


@pytest.mark.slow
def test_a_proof_of_the_task_needs_no_corpus(worker_pool: WorkerPool) -> None:
    model = [
        "--num-layers",
        "4",
        "--hidden-size",
        "64",
        "--num-attention-heads",
        "8",
        "--seq-length",
        "128",
    ]
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    words = ["prove", "bidirectional", "--masked-lm-head", *model, *layout]
    small = shrink_run(resolve_run(build_parser().parse_args(words)), 3, 8)
    assert small.run.model.num_attention_heads == 4 and small.run.model.hidden_size == 24
    assert prove(small, pool=worker_pool).equal
    assert not prove(small, "input-not-summed", pool=worker_pool).equal


def steps(folder: Path) -> dict[int, list[float]]:
    """Returns loss, accuracy and gradient norm of every step."""
    names = ("lm loss", "accuracy", "grad_norm")
    records = read_records(folder / "metrics.jsonl").train
    return {record["iteration"]: [record[name] for name in names] for record in records}


@pytest.mark.parametrize(
    "more",
    [pytest.param("", marks=pytest.mark.slow), OWN],
    ids=["plain", "rule, state and product"],
)
def test_a_run_that_changes_its_layout_equals_one_rank(sentences, run_command, tmp_path, more):
    run = f"{RUN} --train-iters 6 {more}"
    done = run_command(sentences, f"{run} --save {tmp_path}/one")
    assert (
        re.search(r"accuracy value: \S+ \| *\n", done.stdout) and "accuracy PPL" not in done.stdout
    )
    for layout, stop in ((TP2, 2), (PP2, 4), ("", 6)):
        save = f"--save {tmp_path}/moved --load {tmp_path}/moved --exit-interval {stop}"
        run_command(sentences, f"{run} {layout} {save}")
    one, moved = steps(tmp_path / "one"), steps(tmp_path / "moved")
    assert one.keys() == moved.keys() == set(range(1, 7))
    for step, values in one.items():
        assert moved[step] == pytest.approx(values, abs=1e-9), step
    assert len({accuracy for _, accuracy, _ in one.values()}) > 1
    kept = CheckpointStore(tmp_path / "moved").latest_checkpoint().tensors
    assert ("layers.1.attention.center.mean" in kept) == (more == OWN)
    assert "layers.1.attention.center.mean.square_avg" not in kept
    assert ("layers.1.mlp.up.weight.square_avg" in kept) == (more == OWN)
    assert ("layers.1.mlp.down.scale" in kept) == (more == OWN)


def test_a_rule_that_needs_matrices_gets_whole_ones_with_a_distributed_optimizer(
    sentences, run_command, tmp_path
):
    ranks = "--nproc-per-node 2 --use-distributed-optimizer"
    for name, more in (("one", ""), ("two", ranks)):
        words = f"--train-iters 4 --optimizer normalised {more} --save {tmp_path}/{name}"
        run_command(sentences, f"{RUN} {words}")
    one, two = (CheckpointStore(tmp_path / name).latest_checkpoint() for name in ("one", "two"))
    assert one.tensors.keys() == two.tensors.keys()
    assert "layers.0.mlp.up.weight.momentum" in one.tensors
    assert "embedding.word.weight.exp_avg" in one.tensors
    for name in one.tensors:
        torch.testing.assert_close(
            two.read_tensor(name), one.read_tensor(name), rtol=0, atol=1e-9, msg=name
        )


def test_the_product_is_merged_into_the_weights(sentences, run_command, tmp_path):
    words = f"--linear-product scaled --scaled-start 0.8 --save {tmp_path}/scaled"
    run_command(sentences, f"{RUN} --train-iters 2 {words}")
    run_command(sentences, f"megatron-train merge --load {tmp_path}/scaled --save {tmp_path}/plain")
    held, merged = (
        CheckpointStore(tmp_path / name).latest_checkpoint() for name in ("scaled", "plain")
    )
    weight, scale = (held.read_tensor(f"layers.1.mlp.down.{name}") for name in ("weight", "scale"))
    assert (scale != 0.8).all()
    torch.testing.assert_close(
        merged.read_tensor("layers.1.mlp.down.weight"), weight * scale[:, None], rtol=0, atol=1e-15
    )
    assert not any(name.endswith(".scale") for name in merged.tensors)


def test_the_state_changes_the_training(sentences, run_command, tmp_path):
    for name, more in (("plain", ""), ("centered", "--center-inputs")):
        run_command(sentences, f"{RUN} --train-iters 3 {more} --save {tmp_path}/{name}")
    plain, centered = steps(tmp_path / "plain"), steps(tmp_path / "centered")
    assert plain[1] == centered[1]  # the mean is 0 before the first step
    assert all(plain[step][0] != centered[step][0] for step in (2, 3))


@pytest.mark.parametrize("decay", [None, 0.5])
def test_the_update_rule_equals_that_of_torch(decay):
    mine, theirs = (
        [nn.Parameter(torch.linspace(-2, 1, n, dtype=torch.float64)) for n in (5, 9)]
        for _ in range(2)
    )
    names = ["a", "b"]
    table = {
        n: Sharding(tuple(p.shape), weight_decay=True) for n, p in zip(names, mine, strict=False)
    }
    trainable = TrainableParameters(zip(names, mine, strict=False), table, Mesh.single())
    shared = {"clip_grad": 0.0, "weight_decay": 0.1, "adam_eps": 1e-6}
    own = None if decay is None else find_rule("rmsprop").section.config(decay)
    ours = Optimizer(trainable, OptimizerConfig(optimizer="rmsprop", settings=own, **shared))
    alpha = 0.99 if decay is None else decay
    reference = torch.optim.RMSprop(theirs, lr=0.01, alpha=alpha, eps=1e-6, weight_decay=0.1)
    for step in range(5):
        for optimizer, parameters in ((ours, mine), (reference, theirs)):
            optimizer.zero_grad()
            sum((p * (step + 1)).sin().sum() for p in parameters).backward()
        ours.step(0.01)
        reference.step()
    for own, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-14, atol=0)


def test_finetuning_on_ranks_equals_one_rank(sentences, run_command, tmp_path):
    run_command(sentences, f"{RUN} --train-iters 2 --save {tmp_path}/one")
    model = "--masked-lm-head --num-layers 2 --hidden-size 16 --num-attention-heads 4 "
    vocabulary = "--tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt "
    words = RUN.replace("pretrain bidirectional", "finetune masked_lm")
    words = words.replace(model, "").replace(vocabulary, "").replace("--eval-iters 1", "")
    assert not {"--hidden-size", "--vocab-file"} & set(words.split())
    words += f" --pretrained-checkpoint {tmp_path}/one --train-iters 2 --mask-prob 0.3"
    for save, layout in (("alone", ""), ("together", TP2)):
        run_command(sentences, f"{words} --eval-iters 0 {layout} --save {tmp_path}/{save}")
    alone, together = steps(tmp_path / "alone"), steps(tmp_path / "together")
    assert alone.keys() == together.keys() == {1, 2}
    for step, values in alone.items():
        assert together[step] == pytest.approx(values, abs=1e-9), step


@pytest.fixture
def refused(sentences, monkeypatch, capsys, plain_runs):
    """Returns a function that returns the error line of a refused run."""
    monkeypatch.chdir(sentences)

    def run(words: str) -> str:
        assert main(f"{RUN} {words}".split()[1:]) == 1
        *_, line = capsys.readouterr().err.splitlines()
        return line.removeprefix("megatron-train: error: ")

    return run


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--mask-prob 0.01", "--mask-prob 0.01 masks less than one of --seq-length 24 tokens; "),
        ("--mask-prob 1", "--mask-prob must be between 0 and 1, got 1.0"),
        ("--optimizer rmsprop --rmsprop-decay 2", "--rmsprop-decay must be in [0, 1), got 2.0"),
        (
            "--rmsprop-decay 0.9",
            "--rmsprop-decay is a setting of the update rule rmsprop, but the run uses adam; give "
            "--optimizer rmsprop or leave the setting out",
        ),
        (
            "--reset-position-ids",
            "--reset-position-ids has no effect: the task masked_lm does not read it; ",
        ),
        ("--no-masked-lm-head", "the task masked_lm needs an output layer; give --masked-lm-head"),
        ("--task gpt", "--task gpt trains models of kind gpt"),
    ],
)
def test_contradictory_settings_are_refused_in_one_line(words, line, refused):
    assert refused(f"--train-iters 1 {words}").startswith(line)


def test_settings_of_the_task_are_in_the_configuration_and_the_record(
    sentences, refused, run_command, tmp_path
):
    rule = "--optimizer rmsprop --rmsprop-decay 0.5"
    run_command(sentences, f"{RUN} --train-iters 2 --mask-prob 0.4 {rule} --save {tmp_path}/more")
    settings = yaml.safe_load((tmp_path / "more" / "config.yaml").read_text())
    assert settings["masked_lm"] == {"probability": 0.4, "short_samples": 0.1}
    assert settings["rmsprop"] == {"decay": 0.5}
    check = f"megatron-train config check --model bidirectional {tmp_path}/more/config.yaml"
    assert "settings, all valid" in run_command(sentences, check).stdout
    find = "megatron-train config find --model bidirectional masked tokens"
    assert "--mask-prob  (masked_lm.probability)" in run_command(sentences, find).stdout
    again = f"--optimizer rmsprop --train-iters 3 --save {tmp_path}/more --load {tmp_path}/more"
    assert "other data: probability 0.4 in the checkpoint and 0.15 in this run" in refused(again)
    again = f"{again} --mask-prob 0.4 --rmsprop-decay 0.6 --lr-decay-iters 2"
    done = run_command(sentences, f"{RUN} {again}")
    assert "settings of the optimizer differ" in done.stdout + done.stderr
    assert "rmsprop.decay 0.5 in the checkpoint and 0.6 in this run" in done.stdout + done.stderr
    (tmp_path / "run.yaml").write_text("masked_lm: {propability: 0.4}\n")
    assert "did you mean masked_lm.probability?" in refused(f"--config {tmp_path}/run.yaml")
