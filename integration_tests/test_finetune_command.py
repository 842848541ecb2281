"""`megatron-train finetune TASK`: a run with the model, family and tokenizer of a checkpoint."""

import shutil
from pathlib import Path

import pytest
import torch
from megatron_ckpt import Checkpoint, find_checkpoint
from megatron_data import build_gpt_datasets, load_tokenizer
from megatron_data.torch import read_batch
from megatron_models import Placement, config_of, find_kind
from megatron_parallel import Mesh
from megatron_train import read_records

SIZES = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
BASE = f"{SIZES} --activation gelu_tanh --model-family gpt2 --max-position-embeddings 48"
DATA = "--train-data-path train_text_document"
LENGTH = "--micro-batch-size 4 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0"
RUN = f"{DATA} {LENGTH} --no-progress --float64"
TUNE = f"finetune gpt {RUN} --seq-length 32 --pretrained-checkpoint"


@pytest.fixture
def start(train_in, corpus):
    """Returns a function that runs a command in this process and returns its output."""
    return train_in(corpus)


@pytest.fixture
def base(corpus, start):
    """Returns the folder of a run of three steps."""
    if not (corpus / "base").exists():
        start(f"pretrain gpt {RUN} {BASE} --tokenizer-model tokenizer --train-iters 3 --save base")
    return "base"


def losses(folder: Path) -> list[float]:
    return [record["lm loss"] for record in read_records(folder / "metrics.jsonl").train]


def stepped(checkpoint: Checkpoint, corpus: Path, rate: float) -> tuple[float, dict]:
    """Returns the loss of the first batch and the weights after an SGD step, computed by torch."""
    placement = Placement(Mesh.single(), dtype=torch.float64)
    config = config_of(checkpoint.model)
    (model,) = find_kind(config.kind).build(config, placement)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            held = checkpoint.read_tensor(name)
            parameter[: len(held)] = held
    samples = build_gpt_datasets(
        {"train": ["train_text_document"], "valid": None, "test": None},
        None,
        (4, 0, 0),
        sequence_length=32,
        seed=1234,
        order="stateless",
        eod_id=load_tokenizer(corpus / "tokenizer").eod_id,
    ).train
    batch = read_batch(samples, range(4))
    mask = batch["loss_mask"]
    loss = (model(batch["tokens"], labels=batch["labels"]) * mask).sum() / mask.sum()
    loss.backward()
    after = {name: p.detach() - rate * p.grad for name, p in model.named_parameters()}
    return loss.item(), after


def test_the_first_step_starts_from_the_weights_with_a_new_optimizer(corpus, start, base):
    rule = "--optimizer sgd --sgd-momentum 0 --weight-decay 0 --clip-grad 0 --lr 0.1"
    words = f"{rule} --lr-decay-style constant --train-iters 1"
    printed = start(f"{TUNE} {base} {words} --save tuned")
    assert "beginning at step 0 with the weights of base, step 3" in printed
    assert "model.num_layers: 2  [the checkpoint base/iter_0000003]" in printed
    tuned = find_checkpoint("tuned")
    loss, expected = stepped(find_checkpoint(base), corpus, 0.1)
    assert losses(corpus / "tuned") == pytest.approx([loss], rel=1e-12)
    for name, weight in expected.items():
        found = tuned.read_tensor(name)
        torch.testing.assert_close(found, weight[: len(found)], rtol=0, atol=1e-12)
    assert tuned.values()["optimizer"]["steps"] == 1
    assert (tuned.model.kind, tuned.model.family) == ("gpt", "gpt2")
    assert tuned.model.config == find_checkpoint(base).model.config


def test_it_equals_pretrain_with_the_weights_and_continues_itself(corpus, start, base):
    words = "--train-iters 4 --lr 1e-3"
    flags = f"{BASE} --tokenizer-model tokenizer --finetune --load base"
    start(f"pretrain gpt {RUN} {words} {flags} --save by-pretrain")
    again = f"{TUNE} {base} {words} --save again --load again"
    start(f"{again} --exit-interval 2")
    assert "continuing from again after step 2" in start(again)
    assert losses(corpus / "again") == losses(corpus / "by-pretrain")
    one, other = find_checkpoint("again"), find_checkpoint("by-pretrain")
    assert all(
        torch.equal(one.read_tensor(name), other.read_tensor(name)) for name in other.tensors
    )


def test_ranks_finetune_as_one_rank(corpus, start, base, run_command):
    words = f"{TUNE} {base} --train-iters 2 --global-batch-size 8 --lr 1e-3"
    start(f"{words} --save alone")
    cut = "--nproc-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel"
    run_command(corpus, f"megatron-train {words} --save together {cut}")
    assert losses(corpus / "together") == pytest.approx(losses(corpus / "alone"), abs=1e-9)


def test_settings_of_the_model_may_differ_if_the_weights_fit(start, base):
    words = f"{TUNE} {base} --train-iters 1"
    printed = start(f"{words} --init-method-std 0.5 --print-config")
    assert "init_method_std: 0.5" in printed and "# --init-method-std" in printed
    printed = start(f"{words} --num-layers 3", status=1)
    assert (
        printed.count("error:") == 1
        and "num_layers 2 in the checkpoint and 3 in this run" in printed
    )


def test_an_imported_checkpoint_is_finetuned_with_its_tokenizer(corpus, start, base, run_command):
    run_command(corpus, f"megatron-ckpt convert {base} published --to-hf")
    run_command(corpus, "megatron-ckpt convert published imported --from-hf")
    for source, save in (("imported", "from-published"), (base, "from-ours")):
        printed = start(f"{TUNE} {source} --train-iters 2 --save {save}")
        assert f"with the weights of {source}" in printed
        assert f"data.tokenizer_model: {Path(source).absolute().name}/iter_" in printed
    expected = pytest.approx(losses(corpus / "from-ours"), rel=1e-6)
    assert losses(corpus / "from-published") == expected


def test_it_accepts_the_configuration_of_its_own_run(corpus, start, base):
    start(f"{TUNE} {base} --train-iters 1 --lr-decay-iters 2 --save filed")
    words = "finetune gpt --config filed/config.yaml --train-iters 2 --load filed"
    assert "continuing from filed after step 1" in start(words)
    (corpus / "other.yaml").write_text("checkpoint: {finetune: true}\n")
    printed = start(f"{TUNE} {base} --train-iters 1 --config other.yaml", status=1)
    assert "other.yaml: checkpoint.finetune is True, but the command is finetune gpt" in printed


@pytest.mark.parametrize(
    ("words", "message", "status"),
    [
        (f"finetune gpt {RUN}", "needs --pretrained-checkpoint, the folder", 2),
        (f"{TUNE} nowhere", "--pretrained-checkpoint: nowhere", 1),
        (f"{TUNE} torn/iter_0000003", "--pretrained-checkpoint: torn/iter_0000003", 1),
        (f"{TUNE} tokenizer", "--pretrained-checkpoint: tokenizer", 1),
        (f"{TUNE} base --train-iters 1 --save base", "--save base already has a run", 1),
        (f"{TUNE} base --train-iters 1 --recipe llama-tiny", "unknown argument --recipe", 2),
        ("finetune gtp --pretrained-checkpoint base", "gtp", 2),
    ],
)
def test_an_impossible_start_is_refused_in_one_line(corpus, start, base, words, message, status):
    if not (corpus / "torn").exists():
        shutil.copytree(corpus / base, corpus / "torn")
        (shard,) = (corpus / "torn" / "iter_0000003").glob("model-*")
        shard.write_bytes(shard.read_bytes()[:-8])
    printed = start(words, status)
    errors = [line for line in printed.splitlines() if "error:" in line]
    assert len(errors) == 1 and message in errors[0], printed
    assert "Traceback" not in printed


def test_a_model_of_another_kind_is_refused(corpus, start, base):
    pytest.importorskip("bidirectional", reason="pip install -e integration_tests/stranger")
    printed = start(f"finetune masked_lm {RUN} --pretrained-checkpoint {base}", status=1)
    assert printed.strip() == (
        "megatron-train: error: --pretrained-checkpoint: base/iter_0000003 holds a model of kind "
        "gpt, but masked_lm trains bidirectional; use finetune classification or gpt"
    )
