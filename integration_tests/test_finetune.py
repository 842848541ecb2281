"""The start of a run: continued, with the weights of another run, and refused combinations."""

import os
from pathlib import Path

import pytest
from megatron_ckpt import find_checkpoint
from megatron_data import IndexedDataset, IndexedDatasetBuilder
from megatron_train import read_records
from megatron_train.cli import main

SIZES = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
LENGTH = "--micro-batch-size 4 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0"
DATA = "--train-data-path train_text_document --tokenizer-model tokenizer"
TRAIN = f"pretrain gpt {DATA} {LENGTH} --no-progress --lr 1e-3"


@pytest.fixture
def train(train_in, corpus):
    """Returns a function that runs `pretrain gpt` in this process and returns its output."""
    run = train_in(corpus)
    return lambda words, status=0: run(f"{TRAIN} {words}", status)


@pytest.fixture
def base(corpus, train):
    """Returns the folder of a run of ten steps, with which others start."""
    if not (corpus / "base").exists():
        train(f"{SIZES} --train-iters 10 --lr-decay-iters 12 --save base --save-interval 5")
    return "base"


def losses(folder: Path) -> list[float]:
    return [record["lm loss"] for record in read_records(folder / "metrics.jsonl").train]


def test_finetuning_takes_weights_only_and_a_restart_continues_it(corpus, train, base):
    words = f"{SIZES} --train-iters 6 --finetune --load {base} --save tuned"
    printed = train(f"{words} --exit-interval 3")
    assert "beginning at step 0 with the weights of base, step 10" in printed
    steps = read_records(corpus / "tuned" / "metrics.jsonl").train
    assert [step["iteration"] for step in steps] == [1, 2, 3]
    first, last = losses(corpus / "base")[0], losses(corpus / "base")[-1]
    assert abs(steps[0]["lm loss"] - last) < abs(steps[0]["lm loss"] - first)
    assert find_checkpoint(corpus / "tuned").values()["optimizer"]["steps"] == 3

    printed = train(words)
    assert "--save tuned has this run at step 3: continuing it" in printed
    assert "continuing from tuned after step 3" in printed
    train(f"{SIZES} --train-iters 6 --finetune --load {base} --save whole")
    assert losses(corpus / "tuned") == losses(corpus / "whole")
    assert "nothing left to do: the run has 6 steps" in train(words)


def test_a_continued_run_keeps_its_origin(corpus, train, base):
    words = f"{SIZES} --train-iters 4 --save remembered"
    train(f"{words} --finetune --load {base} --exit-interval 1")
    train(f"{words} --load remembered --exit-interval 2")
    printed = train(f"{words} --finetune --load {base}")
    assert "continuing from remembered after step 2" in printed


def test_a_pretrained_checkpoint_is_used_only_by_the_first_start(corpus, train, base):
    words = f"{SIZES} --train-iters 4 --pretrained-checkpoint {base} --load p --save p"
    assert "with the weights of base, step 10" in train(f"{words} --exit-interval 2")
    assert "continuing from p after step 2" in train(words)
    assert find_checkpoint(corpus / "p").iteration == 4


def test_a_single_checkpoint_may_be_named(train, base):
    printed = train(f"{SIZES} --train-iters 1 --finetune --load {base}/iter_0000005")
    assert "the weights of base/iter_0000005, step 5" in printed


def test_weights_may_have_another_dtype(train, base):
    printed = train(f"{SIZES} --train-iters 2 --finetune --load {base} --bf16 --save bf16")
    assert "with the weights of base" in printed


def test_a_continued_run_may_have_a_new_optimizer(corpus, train, base):
    train(f"{SIZES} --train-iters 12 --lr-decay-iters 12 --load {base} --save kept")
    train(f"{SIZES} --train-iters 12 --lr-decay-iters 12 --load {base} --save anew --no-load-optim")
    kept, anew = find_checkpoint(corpus / "kept"), find_checkpoint(corpus / "anew")
    assert (kept.iteration, anew.iteration) == (12, 12)
    assert kept.values()["optimizer"]["steps"] == 12
    assert anew.values()["optimizer"]["steps"] == 2
    assert losses(corpus / "kept")[0] == losses(corpus / "anew")[0]
    assert losses(corpus / "kept")[1] != losses(corpus / "anew")[1]


def test_another_seed_is_refused_without_no_load_rng(train, base):
    words = f"{SIZES} --train-iters 11 --lr-decay-iters 12 --load {base} --seed 5"
    printed = train(words, status=1)
    assert "was saved with --seed 1234, but this run has --seed 5" in printed
    assert "seed 1234 in the checkpoint and 5 in this run" in train(f"{words} --no-load-rng")


def test_sizes_may_come_from_the_checkpoint(train, base):
    words = "--seq-length 32 --train-iters 1 --use-checkpoint-args --finetune"
    printed = train(f"{words} --load {base}")
    assert "model.num_layers: 2  [the checkpoint base/iter_0000010]" in printed
    printed = train(f"{words} --load {base} --num-layers 3", status=1)
    assert "num_layers 2 in the checkpoint and 3 in this run" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--finetune --load nowhere", "--load nowhere has no complete checkpoint to load"),
        ("--pretrained-checkpoint nowhere", "--pretrained-checkpoint nowhere has no complete"),
        ("--finetune --load base --save base", "did not begin with the weights of base"),
        ("--pretrained-checkpoint base --save base", "already has a run, at step 10"),
        (
            "--finetune --load base --hidden-size 64",
            "holds another model: hidden_size 32 in the checkpoint",
        ),
    ],
)
def test_an_impossible_start_is_refused_in_one_line(train, base, words, message):
    printed = train(f"{SIZES} --train-iters 2 {words}", status=1)
    errors = [line for line in printed.splitlines() if "error:" in line]
    assert len(errors) == 1 and message in errors[0], printed


def test_the_test_set_is_evaluated_once_at_the_end(corpus, train):
    words = (
        "--train-iters 2 --test-data-path valid_text_document --valid-data-path train_text_document"
    )
    printed = train(f"{SIZES} {words} --eval-iters 2 --save tested")
    assert printed.count("validation loss at iteration 2 on test set | lm loss value:") == 1
    events = read_records(corpus / "tested" / "metrics.jsonl").events
    (test,) = [event for event in events if event["event"] == "test"]
    assert test["iteration"] == 2 and test["lm loss"] > 0


def test_the_last_share_of_a_split_is_the_test_set(corpus, train):
    """Checks that the share gives the loss of a corpus with the same documents alone.

    The learning rate is 0, so that both runs have the initial weights of the seed.
    """
    bounds = {"first": (0, 120), "second": (120, 135), "third": (135, 150)}  # of 150: 8, 1, 1
    with IndexedDataset(corpus / "train_text_document") as whole:
        for name, (begin, end) in bounds.items():
            with IndexedDatasetBuilder(corpus / name, whole.dtype) as builder:
                for number in range(begin, end):
                    tokens = whole.document(number)
                    builder.add_document(tokens, [len(tokens)])
                builder.finalize()

    def tested(data: str, save: str) -> float:
        words = f"{SIZES} --train-iters 1 --micro-batch-size 4 --eval-iters 3 --lr 0 --no-progress"
        words += f" --tokenizer-model tokenizer --save {save}"
        assert main(f"pretrain gpt {data} {words}".split()) == 0
        events = read_records(corpus / save / "metrics.jsonl").events
        return [event["lm loss"] for event in events if event["event"] == "test"]

    shares = tested("--data-path train_text_document --split 8,1,1", "shares")
    assert len(shares) == 1
    parts = "--train-data-path first --valid-data-path second --test-data-path"
    assert shares == tested(f"{parts} third", "parts") != tested(f"{parts} first", "others")
    assert tested("--data-path train_text_document --split 9,1", "without") == []


def test_a_split_without_test_set_prints_one_line(corpus, train_in):
    call = train_in(corpus)
    words = f"{SIZES} --train-iters 1 --micro-batch-size 4 --eval-iters 1 --no-progress"
    words += " --data-path valid_text_document --tokenizer-model tokenizer"
    printed = call(f"pretrain gpt {words}")  # 60 documents: 58, 2, 0
    assert (
        printed.count(
            "no test after the last step: test split of valid_text_document (0 of 60 sequences): "
            "the split holds no token\n"
        )
        == 1
    )
    assert (
        "valid split of valid_text_document (0 of 60 sequences): the split holds no token; "
        "enlarge it, as with --split 8,2,0, or skip evaluation with --eval-iters 0"
    ) in call(f"pretrain gpt {words} --split 1000,1,0", 1)


def test_ranks_start_with_the_weights_of_one_rank(corpus, train, base, command, preloaded):
    words = f"{SIZES} --train-iters 3 --finetune --load {base} --float64 --global-batch-size 4"
    train(f"{words} --save alone")
    ranks = "--nproc-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel"
    line = f"megatron-train {TRAIN} {words} --save together {ranks}"

    def start(more: str = ""):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        words = command(f"{line} {more}")
        return preloaded.run(words, cwd=corpus, env=environment, capture_output=True, text=True)

    done = start()
    assert done.returncode == 0, done.stderr
    assert "beginning at step 0 with the weights of base, step 10" in done.stdout
    assert losses(corpus / "together") == pytest.approx(losses(corpus / "alone"), rel=1e-12)
    refused = start("--load alone")  # the origin differs from that of the folder
    assert refused.returncode == 1
    assert refused.stderr.count("error:") == 1 and "Traceback" not in refused.stderr
    assert "did not begin with the weights of alone" in refused.stderr


def test_an_imported_checkpoint_is_finetuned_with_its_sizes(corpus, train, base, run_command):
    run_command(corpus, f"megatron-ckpt convert {base} published --to-hf")
    run_command(corpus, "megatron-ckpt convert published imported --from-hf")
    words = "--seq-length 32 --train-iters 3 --use-checkpoint-args --finetune"
    printed = train(f"{words} --load imported --save from-published")
    assert "beginning at step 0 with the weights of imported, step 0" in printed
    train(f"{words} --load {base} --save from-ours")
    assert losses(corpus / "from-published") == pytest.approx(
        losses(corpus / "from-ours"), rel=1e-5
    )
    printed = train(f"{words.replace('--finetune', '')} --load imported", status=1)
    assert printed.count("error:") == 1
    assert "has weights but no run to continue; begin a new run with them with --fine" in printed


def test_a_run_with_a_number_of_samples_drops_an_incomplete_batch(corpus, train):
    words = f"{SIZES} --train-samples 27 --global-batch-size 8 --lr-warmup-samples 8"
    train(f"{words} --save by-samples --exit-interval 2")
    printed = train(f"{words} --save by-samples --load by-samples")
    assert "continuing from by-samples after step 2" in printed and "warning" not in printed
    steps = read_records(corpus / "by-samples" / "metrics.jsonl").train
    assert [step["consumed_samples"] for step in steps] == [8, 16, 24]
    rates = [step["learning_rate"] for step in steps]
    assert rates[0] == 0 and rates[1] == 1e-3 and rates[2] == pytest.approx(1e-3 * 11 / 19)
