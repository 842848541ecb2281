"""`megatron-train pretrain bert` on sentences that megatron-data prepared, and its fine-tuning."""

import json
import random
import re
from pathlib import Path

import pytest
from megatron_ckpt import find_checkpoint
from megatron_train import read_records
from megatron_train.config.recipes import recipe_kind

WORDS = ["cat", "dog", "bird", "saw", "big", "small", "red", "ran", "sat", "mat", "tree", "then"]
SIZES = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
RUN = (
    f"megatron-train pretrain bert {SIZES} --data-path my-bert_text_sentence --vocab-file "
    "bert-vocab.txt --split 8,2,0 --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 "
    "--eval-interval 6 --eval-iters 1 --log-interval 2"
)
TP2 = "--nproc-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--nproc-per-node 2 --pipeline-model-parallel-size 2"
CP2 = "--nproc-per-node 2 --context-parallel-size 2"
DP2 = "--nproc-per-node 2 --use-distributed-optimizer"

# The README's pretraining of a BERT of 345 million parameters, without --checkpoint-activations,
# which `pretrain gpt` refuses as well.
README = (
    "pretrain bert --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 "
    "--max-position-embeddings 512 --lr 0.0001 --lr-decay-iters 990000 --train-iters 2000000 "
    "--min-lr 0.00001 --lr-warmup-fraction 0.01 --micro-batch-size 4 --global-batch-size 8 "
    "--vocab-file bert-vocab.txt --split 949,50,1 --log-interval 10 --save-interval 500 "
    "--eval-interval 100 --eval-iters 10 --save checkpoints/bert_345m --load checkpoints/bert_345m "
    "--data-path my-bert_text_sentence --fp16"
)
PREPROCESS = (
    "megatron-data preprocess --input my-corpus.json --output-prefix my-bert --vocab-file "
    "bert-vocab.txt --tokenizer-type BertWordPieceLowerCase --split-sentences"
)
SMALL = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --train-iters 4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, run_command) -> Path:
    """Returns a folder with the README's corpus, vocabulary and prepared sentences, and texts."""
    folder = tmp_path_factory.mktemp("bert")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "##s", *WORDS]
    (folder / "bert-vocab.txt").write_text("\n".join(vocabulary) + "\n")
    draw = random.Random(1)

    def sentence() -> str:
        return " ".join(draw.choices((*WORDS[:3], "cats"), k=6)).capitalize() + "."

    lines = [" ".join(sentence() for _ in range(draw.randint(3, 6))) for _ in range(60)]
    (folder / "my-corpus.json").write_text("".join(json.dumps({"text": t}) + "\n" for t in lines))
    run_command(folder, PREPROCESS)
    rows = [(draw.choice(("red", "small")), draw.choices(WORDS, k=5)) for _ in range(120)]
    (folder / "colours.tsv").write_text(
        "text\tlabel\n" + "".join(f"{' '.join([*w, c])}\t{c == 'red'}\n" for c, w in rows)
    )
    return folder


def steps(folder: Path, *names: str) -> dict[int, list[float]]:
    """Returns values of every step."""
    records = read_records(folder / "metrics.jsonl").train
    return {record["iteration"]: [record[name] for name in names] for record in records}


PAIRS = ("lm loss", "sop loss", "sop accuracy", "grad_norm")


@pytest.mark.parametrize(
    ("more", "names", "layouts"),
    [
        pytest.param("", PAIRS, (TP2, PP2), id="pairs"),
        pytest.param("", PAIRS, (DP2, CP2, TP2, "", PP2), id="more", marks=pytest.mark.slow),
        pytest.param(
            "--bert-no-binary-head --no-calculate-per-token-loss --num-tokentypes 0",
            ("lm loss", "grad_norm"),
            (PP2, TP2),
            id="without a binary head",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_changes_its_layout_with_falling_loss(
    folder, run_command, tmp_path, more, names, layouts
):
    """Checks in float64 and with dropout that each layout continues another's run."""
    iterations = 6 * len(layouts)
    exact = f"{RUN} {more} --train-iters {iterations} --float64"
    run_command(folder, f"{exact} --save {tmp_path}/one")
    for layout, stop in zip(layouts, range(6, iterations + 1, 6), strict=True):
        options = f"--save {tmp_path}/moved --load {tmp_path}/moved --exit-interval {stop}"
        run_command(folder, f"{exact} {layout} {options}")
    one, moved = (steps(tmp_path / name, *names) for name in ("one", "moved"))
    assert moved.keys() == one.keys() == set(range(1, iterations + 1))
    for step, values in one.items():
        assert moved[step] == pytest.approx(values, abs=1e-9), step
    assert moved[iterations][0] < moved[7][0] < moved[1][0]
    evaluations = [
        [[r[name] for name in names[:-1]] for r in read_records(run / "metrics.jsonl").validation]
        for run in (tmp_path / "one", tmp_path / "moved")
    ]
    assert len(evaluations[0]) == len(layouts)
    for ours, theirs in zip(*evaluations, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-9)


def shown(printed: str) -> dict[str, str]:
    lines = (line.split("#")[0] for line in printed.splitlines())
    return dict(re.findall(r"^  (\w+): (.*?) *$", "\n".join(lines), re.MULTILINE))


def test_the_readmes_line_has_megatrons_meaning(folder, train_in):
    found = shown(train_in(folder)(f"{README} --print-config"))
    # The vocabulary has 19 lines; [BOS] and [EOS] come after them, as in Megatron-LM.
    expected = {"num_layers": "24", "vocab_size": "21", "max_position_embeddings": "512"}
    expected |= {"tokenizer_type": "BertWordPieceLowerCase", "sample_order": "compat"}
    expected |= {"mask_prob": "0.15", "short_seq_prob": "0.1", "bert_binary_head": "true"}
    expected |= {"lr": "0.0001", "lr_decay_iters": "990000", "split": "'949,50,1'"}
    assert expected.items() <= found.items()


def test_flags_of_the_readme_that_are_not_supported_are_refused_as_for_gpt(folder, train_in):
    printed = train_in(folder)(f"{README} --checkpoint-activations", 2)
    assert "give --recompute-granularity full" in printed


def test_the_readmes_line_trains_and_continues(folder, train_in):
    start = train_in(folder)
    words = f"{README} {SMALL} --lr-decay-iters 4 --eval-iters 1 --split 8,2,0 --no-progress"
    assert "stopped after step 2 of 4" in start(f"{words} --exit-interval 2")
    printed = start(f"{words} --log-interval 2")
    assert "continuing from checkpoints/bert_345m after step 2" in printed
    assert re.search(r"iteration +4/ +4 .* lm loss: \S+ \| sop loss: \S+ \| sop accuracy", printed)
    assert re.search(r"sop loss PPL: \S+ \| sop accuracy value: \S+ \| *\n", printed)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--mask-prob 1", "--mask-prob must be between 0 and 1, got 1.0"),
        ("--short-seq-prob 2", "--short-seq-prob must be in [0, 1], got 2.0"),
        ("--mask-geometric --mask-permutation", "exclude each other; give one"),
        ("--sample-order packed", "--sample-order packed does not work with the task bert"),
        ("--reset-position-ids", "--reset-position-ids has no effect: the task bert does not"),
        ("--no-masked-lm-head", "the task bert needs the head of masked language modelling"),
        ("--seq-length 4", "--seq-length 4 has no room for text"),
        (
            "--max-position-embeddings 33 --position-offset 2",
            "--seq-length 32 exceeds --max-position-embeddings 33 without the first 2; lower the",
        ),
        (
            "--task gpt --tokenizer-type BertWordPieceLowerCase",
            "not bert; give one of bert, classification",
        ),
        ("--recipe llama-tiny", "--recipe llama-tiny is for models of kind gpt, not bert"),
    ],
)
def test_contradictory_settings_are_refused_in_one_line(folder, train_in, words, line):
    run = RUN.removeprefix("megatron-train ")
    *_, last = train_in(folder)(f"{run} --train-iters 1 {words}", 1).splitlines()
    assert line in last and last.startswith("megatron-train: error: ")


def test_other_samples_are_refused_when_a_run_continues(folder, train_in):
    start, run = train_in(folder), RUN.removeprefix("megatron-train ")
    run = f"{run} --eval-iters 0 --no-progress"
    start(f"{run} --train-iters 1 --save one")
    jump = "--override-opt-param-scheduler"
    longer = start(f"{run} --train-iters 2 --save one --load one {jump}")
    assert "learning rate jumps at step 1" in longer
    assert "samples 8 in the checkpoint and 16 in this run; the order depends on" in longer
    other = start(f"{run} --train-iters 2 --mask-prob 0.3 --save one --load one", 1)
    assert "mask_prob 0.15 in the checkpoint and 0.3 in this run" in other


FIRST = "--train-iters 1 --eval-iters 0 --no-progress --lr 0 --min-lr 0"


@pytest.fixture(scope="module")
def first_losses(folder, run_command) -> list[float]:
    """Returns the losses of the first step with the default samples."""
    run_command(folder, f"{RUN} {FIRST} --save defaults")
    return steps(folder / "defaults", "lm loss")[1]


@pytest.mark.parametrize(
    "words",
    [
        "--mask-prob 0.4",
        "--short-seq-prob 1",
        "--mask-max-ngram 1",
        "--no-mask-whole-words",
        "--mask-longer-ngrams",
        "--mask-geometric",
        "--mask-permutation",
        "--bert-no-binary-head",
        "--tokenizer-type BertWordPieceCase --allow-tokenizer-mismatch",
    ],
)
def test_a_flag_changes_the_samples(folder, train_in, first_losses, words):
    run = RUN.removeprefix("megatron-train ")
    name = words.split()[0].strip("-")
    train_in(folder)(f"{run} {FIRST} {words} --save {name}")
    same = name == "tokenizer-type"  # the corpus has the tokens already
    assert (steps(folder / name, "lm loss")[1] == first_losses) == same


@pytest.mark.parametrize("name", ["bert-tiny", "megatron-bert-345m"])
def test_a_recipe_trains(folder, train_in, name):
    assert recipe_kind(name) == "bert"
    words = f"pretrain bert --recipe {name} {SMALL} --micro-batch-size 2 --global-batch-size 4"
    data = "--data-path my-bert_text_sentence --vocab-file bert-vocab.txt --split 8,2,0"
    lengths = "--train-iters 6 --lr-decay-iters 6 --lr 1e-2 --eval-iters 1 --eval-interval 3"
    printed = train_in(folder)(f"{words} {data} {lengths} --no-progress --save {name}")
    assert f"[recipe {name}: " in printed
    losses = [loss for (loss,) in steps(folder / name, "lm loss").values()]
    assert len(losses) == 6 and losses[-1] < losses[0]


@pytest.fixture(scope="module")
def base(folder, run_command) -> Path:
    """Returns the folder of a pretrained model."""
    run_command(folder, f"{RUN} --train-iters 20 --float64 --save base")
    return folder / "base"


TUNE = (
    "finetune classification --pretrained-checkpoint base --data-path colours.tsv --split 80,20,0 "
    "--seq-length 16 --micro-batch-size 4 --global-batch-size 8 --epochs 6 --lr 1e-2 "
    "--lr-warmup-fraction .1 --eval-interval 30 --log-interval 10 --no-progress --float64"
)


def test_finetuning_begins_with_the_trunk_and_a_new_head(folder, base, train_in):
    printed = train_in(folder)(f"{TUNE} --lr 0 --min-lr 0 --exit-interval 1 --save new")
    assert "classification.class_names: False True  [the training texts]" in printed
    assert "are new, from --seed: sequence_head.out.bias, sequence_head.out.weight" in printed
    held, tuned = find_checkpoint(base), find_checkpoint(folder / "new")
    same = {name for name in tuned.tensors if not name.startswith("sequence_head.out.")}
    weights = {n for n in same if tuned.tensors[n].group == "model"}
    assert "sequence_head.pooler.weight" in weights and "lm_head.dense.weight" not in weights
    for name in weights:
        assert (tuned.read_tensor(name) == held.read_tensor(name)).all(), name
    mine, theirs = (c.read_tensor("sequence_head.out.weight") for c in (tuned, held))
    assert mine.shape == theirs.shape and not (mine == theirs).any()
    assert tuned.model.config["task_head"] == "classification"


def test_a_finetuned_model_beats_the_majority_class(folder, base, train_in):
    start = train_in(folder)
    printed = start(f"{TUNE} --save tuned --load tuned")
    records = read_records(folder / "tuned" / "metrics.jsonl")
    assert [*records.train[0]][3:6] == ["classification loss", "accuracy", "F1"]
    last = records.validation[-1]
    assert last["accuracy"] > 0.9 and last["MCC"] > 0.8 and last["F1"] > 0.9
    assert re.search(r"accuracy value: \S+ \| F1 value: \S+ \| MCC value: \S+ \| *\n", printed)
    assert "nothing left to do" in start(f"{TUNE} --save tuned --load tuned")


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("gpt", SIZES),
        pytest.param(
            "hybrid",
            "--hybrid-layer-pattern M*M- --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
            "--mamba-num-heads 4 --mamba-head-dim 16 --mamba-num-groups 2 --mamba-state-dim 8",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_decoder_classifies_by_its_last_token(folder, run_command, tmp_path, kind, sizes):
    run = RUN.replace("pretrain bert", f"pretrain {kind}").replace(SIZES, sizes)
    tokenizer = "--tokenizer-type BertWordPieceLowerCase"
    base = f"{tmp_path}/base"
    run_command(folder, f"{run} {tokenizer} --train-iters 3 --eval-iters 0 --float64 --save {base}")
    words = TUNE.replace("checkpoint base", f"checkpoint {base}")
    words = f"megatron-train {words} --exit-interval 4"
    done = run_command(folder, f"{words} --save {tmp_path}/alone")
    assert "are new, from --seed: sequence_head.out.weight" in done.stdout
    run_command(folder, f"{words} {TP2} --save {tmp_path}/together")
    names = ("classification loss", "accuracy", "MCC", "grad_norm")
    alone, together = (steps(tmp_path / name, *names) for name in ("alone", "together"))
    assert alone.keys() == together.keys() == set(range(1, 5))
    for step, values in alone.items():
        assert together[step] == pytest.approx(values, abs=1e-9), step


@pytest.mark.parametrize("layout", [TP2, pytest.param(PP2, marks=pytest.mark.slow)])
def test_ranks_finetune_as_one_rank(folder, base, run_command, tmp_path, layout):
    words = f"megatron-train {TUNE} --exit-interval 6 --eval-interval 6"
    for save, more in (("alone", ""), ("together", layout)):
        run_command(folder, f"{words} {more} --save {tmp_path}/{save}")
    names = ("classification loss", "accuracy", "F1", "MCC", "grad_norm")
    alone, together = (steps(tmp_path / name, *names) for name in ("alone", "together"))
    assert alone.keys() == together.keys() == set(range(1, 7))
    for step, values in alone.items():
        assert together[step] == pytest.approx(values, abs=1e-9), step


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--label-column gold", "no column 'gold' in the header line; it has 'text', 'label'"),
        ("--class-names True Other", "the label 'False' is not one of the classes True, Other"),
        ("--num-labels 3", "--num-labels 3 does not fit the 2 classes False, True; use 2"),
        ("--task-head regression --num-labels 2", "does not fit the task classification"),
        ("--epochs 0", "--epochs must be positive, got 0"),
        ("--train-iters 3", "--epochs and --train-iters exclude each other; give one"),
        ("--text-columns text label", "have a name twice"),
        ("--data-path none.tsv", "none.tsv does not exist"),
    ],
)
def test_wrong_texts_and_classes_are_refused_in_one_line(folder, base, train_in, words, line):
    *_, last = train_in(folder)(f"{TUNE} {words}", 1).splitlines()
    assert line in last and last.startswith("megatron-train: error: ")
