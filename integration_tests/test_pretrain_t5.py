"""`megatron-train pretrain t5` on sentences that megatron-data prepared."""

import json
import random
import re
from pathlib import Path

import pytest
from megatron_train import read_records
from megatron_train.config.recipes import recipe_kind

WORDS = ["cat", "dog", "bird", "saw", "big", "small", "red", "ran", "sat", "mat", "tree", "then"]
SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --encoder-seq-length 32 "
    "--decoder-seq-length 24 --max-position-embeddings 32"
)
DATA = (
    "--data-path my-t5_text_sentence --vocab-file bert-vocab.txt --vocab-extra-ids 20 "
    "--tokenizer-type BertWordPieceCase --split 8,2,0"
)
RUN = (
    f"megatron-train pretrain t5 {SIZES} {DATA} --micro-batch-size 2 --global-batch-size 8 "
    "--lr 1e-2 --eval-interval 6 --eval-iters 1 --log-interval 2"
)
RELATIVE = (
    "--position-embedding-type relative --relative-attention-num-buckets 8 --normalization RMSNorm "
    "--relative-attention-max-distance 20 --disable-bias-linear --activation geglu_tanh "
    "--softmax-scale 1"
)
TP2 = "--nproc-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--nproc-per-node 2 --pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
DP2 = "--nproc-per-node 2 --use-distributed-optimizer"

# examples/t5/train_t5_220m_distributed.sh of Megatron-LM; without the launcher's flags. The
# implementation is `local`, since the kernels of Transformer Engine need a GPU.
SCRIPT = (
    "pretrain t5 --encoder-num-layers 12 --decoder-num-layers 12 --hidden-size 768 "
    "--num-attention-heads 12 --kv-channels 64 --ffn-hidden-size 3072 --encoder-seq-length 512 "
    "--decoder-seq-length 128 --max-position-embeddings 512 --micro-batch-size 64 "
    "--global-batch-size 512 --lr 0.0001 --train-iters 1000000 --lr-decay-iters 1000000 "
    "--lr-decay-style linear --min-lr 0.00001 --weight-decay 1e-2 --lr-warmup-fraction .01 "
    "--clip-grad 1.0 --bf16 --vocab-extra-ids 100 --init-method-std 0.015 "
    "--transformer-impl local --tensor-model-parallel-size 1 "
    "--pipeline-model-parallel-size 1 --attention-backend auto --data-path my-t5_text_sentence "
    "--vocab-file bert-vocab.txt --tokenizer-type BertWordPieceCase --split 99982,9,9 "
    "--log-interval 100 --tensorboard-dir board --save-interval 500 --eval-interval 1000 "
    "--eval-iters 10 --distributed-backend nccl --save checkpoints/t5_220m "
    "--load checkpoints/t5_220m"
)
PREPROCESS = (
    "megatron-data preprocess --input my-corpus.json --output-prefix my-t5 --vocab-file "
    "bert-vocab.txt --tokenizer-type BertWordPieceCase --split-sentences"
)
SMALL = (
    "--encoder-num-layers 2 --decoder-num-layers 2 --hidden-size 32 --num-attention-heads 2 "
    "--kv-channels 16 --ffn-hidden-size 64 --encoder-seq-length 32 --decoder-seq-length 24 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr-decay-iters 4 --eval-iters 1 "
    "--split 8,2,0 --no-progress"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, run_command) -> Path:
    """Returns a folder with a corpus, its vocabulary and its prepared sentences."""
    folder = tmp_path_factory.mktemp("t5")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *WORDS]
    vocabulary += [word.capitalize() for word in WORDS]
    (folder / "bert-vocab.txt").write_text("\n".join(vocabulary) + "\n")
    draw = random.Random(1)

    def sentence() -> str:
        return " ".join(draw.choices(WORDS[:4], k=6)).capitalize() + "."

    lines = [" ".join(sentence() for _ in range(draw.randint(3, 6))) for _ in range(60)]
    (folder / "my-corpus.json").write_text("".join(json.dumps({"text": t}) + "\n" for t in lines))
    run_command(folder, PREPROCESS)
    return folder


def steps(folder: Path, *names: str) -> dict[int, list[float]]:
    """Returns values of every step."""
    records = read_records(folder / "metrics.jsonl").train
    return {record["iteration"]: [record[name] for name in names] for record in records}


@pytest.mark.parametrize(
    ("more", "layouts"),
    [
        pytest.param("", (TP2, PP2), id="learned positions"),
        pytest.param(RELATIVE, (PP2, VPP2, TP2), id="relative positions", marks=pytest.mark.slow),
        pytest.param(RELATIVE, (DP2, "", PP2), id="sharded", marks=pytest.mark.slow),
    ],
)
def test_a_run_changes_its_layout_with_falling_loss(folder, run_command, tmp_path, more, layouts):
    """Checks in float64 and with dropout that each layout continues another's run."""
    iterations = 6 * len(layouts)
    exact = f"{RUN} {more} --train-iters {iterations} --float64"
    run_command(folder, f"{exact} --save {tmp_path}/one")
    for layout, stop in zip(layouts, range(6, iterations + 1, 6), strict=True):
        options = f"--save {tmp_path}/moved --load {tmp_path}/moved --exit-interval {stop}"
        run_command(folder, f"{exact} {layout} {options}")
    one, moved = (steps(tmp_path / name, "lm loss", "grad_norm") for name in ("one", "moved"))
    assert moved.keys() == one.keys() == set(range(1, iterations + 1))
    for step, values in one.items():
        assert moved[step] == pytest.approx(values, abs=1e-9), step
    assert moved[iterations][0] < moved[7][0] < moved[1][0]
    evaluations = [
        [r["lm loss"] for r in read_records(run / "metrics.jsonl").validation]
        for run in (tmp_path / "one", tmp_path / "moved")
    ]
    assert len(evaluations[0]) == len(layouts)
    assert evaluations[0] == pytest.approx(evaluations[1], abs=1e-9)


def shown(printed: str) -> dict[str, str]:
    lines = (line.split("#")[0] for line in printed.splitlines())
    return dict(re.findall(r"^  (\w+): (.*?) *$", "\n".join(lines), re.MULTILINE))


def test_the_scripts_line_has_megatrons_meaning(folder, train_in):
    found = shown(train_in(folder)(f"{SCRIPT} --print-config"))
    # 30 lines of the vocabulary, [BOS] and [EOS], and 100 sentinels.
    expected = {"num_layers": "12", "encoder_num_layers": "12", "vocab_size": "132"}
    expected |= {"seq_length": "512", "decoder_seq_length": "128", "mask_prob": "0.15"}
    expected |= {"mask_max_ngram": "10", "mask_geometric": "true", "short_seq_prob": "0.1"}
    expected |= {"tokenizer_type": "BertWordPieceCase", "init_method_std": "0.015"}
    assert expected.items() <= found.items()


def test_the_scripts_line_trains_and_continues(folder, train_in):
    start = train_in(folder)
    words = f"{SCRIPT} {SMALL}"
    assert "stopped after step 2 of 4" in start(f"{words} --exit-interval 2")
    printed = start(f"{words} --log-interval 2")
    assert "continuing from checkpoints/t5_220m after step 2" in printed
    assert re.search(r"iteration +4/ +4 .* lm loss: \S+", printed)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--decoder-seq-length 33", "--decoder-seq-length 33 exceeds --max-position-embeddings 32"),
        ("--decoder-seq-length 3", "--decoder-seq-length 3 has no room for text"),
        ("--decoder-seq-length 0", "--decoder-seq-length must be positive, got 0"),
        ("--mask-permutation --no-mask-geometric", "--mask-permutation does not work with spans"),
        ("--context-parallel-size 2 --nproc-per-node 2", "cannot cut the sequences of an enc"),
        ("--relative-attention-num-buckets 8", "--relative-attention-num-buckets 8 has no effect"),
        ("--separate-decoder-embedding", "set --untie-embeddings-and-output-weights too"),
        ("--vocab-extra-ids 0", "samples need sentinels"),
        ("--task gpt", "trains models of kind"),
    ],
)
def test_contradictory_settings_are_refused_in_one_line(folder, train_in, words, line):
    run = RUN.removeprefix("megatron-train ")
    *_, last = train_in(folder)(f"{run} --train-iters 1 {words}", 1).splitlines()
    assert line in last and last.startswith("megatron-train: error: ")


@pytest.mark.parametrize("name", ["t5-tiny", "t5-base"])
def test_a_recipe_trains(folder, train_in, name):
    assert recipe_kind(name) == "t5"
    words = f"pretrain t5 --recipe {name} {SMALL} --train-iters 6 --lr-decay-iters 6 --lr 1e-2"
    data = f"{DATA} --eval-interval 3 --save {name}"
    printed = train_in(folder)(f"{words} {data}")
    assert f"[recipe {name}: " in printed
    losses = [loss for (loss,) in steps(folder / name, "lm loss").values()]
    assert len(losses) == 6 and losses[-1] < losses[0]
