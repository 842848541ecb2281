"""The record of a run in its checkpoints, and which parts may differ when it continues."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron_data import ByteTokenizer
from megatron_data.tokenizers import NullTokenizer
from megatron_models import GPTConfig
from megatron_optim import OptimizerConfig
from megatron_train import CheckpointConfig, DataConfig, RunConfig, ScheduleConfig, TrainingConfig
from megatron_train.config.sections import LoggingConfig
from megatron_train.data_identity import corpora_identity
from megatron_train.errors import TrainError
from megatron_train.product_record import (
    build_recorded_products,
    record_product,
    recorded_product,
    refuse_other_product,
    refuse_other_tensors,
)
from megatron_train.run_record import (
    compare_records,
    recorded_rule,
    run_record,
    upgrade_record,
    uses_null_tokenizer,
    without_schedules,
)
from megatron_train.tasks.gpt_data import GPTData

from .test_configuration import MINIMAL, parse

PATH = Path("iter_0000002")
FIELDS = {
    "model": {
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "vocab_size": 257,
        "max_position_embeddings": 4,
        "num_experts": 2,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    "data": {"seq_length": 4, "data_path": ("2", "a", "1", "b"), "tokenizer_model": "bytes"},
    "training": {"train_iters": 3, "micro_batch_size": 2, "global_batch_size": 4},
    "optimizer": {"lr": 1e-3},
    "schedule": {},
    "checkpoint": {},
    "logging": {},
}
CLASSES = {
    "model": GPTConfig,
    "data": DataConfig,
    "training": TrainingConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
}


@pytest.fixture(autouse=True)
def corpora(tmp_path, monkeypatch):
    """Writes corpora `a` and `b`, and `moved/a` with the content of `a`."""
    monkeypatch.chdir(tmp_path)
    Path("moved").mkdir()
    for name, content in (("a", b"abc"), ("b", b"abd"), ("moved/a", b"abc")):
        for end in ("bin", "idx"):
            Path(f"{name}.{end}").write_bytes(content)


def record(changes=(), tokenizer=None):
    """Returns the record of the run with changes by ``section.field``, as loaded."""
    fields = {section: dict(values) for section, values in FIELDS.items()}
    for key, value in dict(changes).items():
        section, name = key.split(".")
        fields[section][name] = value
    config = RunConfig(**{name: cls(**fields[name]) for name, cls in CLASSES.items()})
    tokenizer = tokenizer or ByteTokenizer()
    samples = GPTData(config, tokenizer).identity()
    return json.loads(json.dumps(run_record(config, tokenizer, samples)))


REFUSED = {
    "data.data_path": ("data", ("2", "a", "1", "a")),
    "data.split": ("data", "9,1,0"),
    "data.seq_length": ("data", 2),
    "data.sample_order": ("data", "packed"),
    "data.reset_attention_mask": ("data", True),
    "data.reset_position_ids": ("data", True),
    "training.seed": ("seed", 5),
    "data.eod_mask_loss": ("objective", True),
    "training.calculate_per_token_loss": ("objective", False),
    "training.hidden_dropout": ("objective", 0.0),
    "training.attention_dropout": ("objective", 0.0),
    "model.moe_aux_loss_coeff": ("objective", 0.5),
    "model.moe_z_loss_coeff": ("objective", 0.5),
    "model.moe_router_bias_update_rate": ("objective", 0.5),
    "model.moe_router_load_balancing_type": ("objective", "seq_aux_loss"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_another_run_is_refused_unless_the_differing_part_is_allowed(key):
    kind, value = REFUSED[key]
    saved, current = record(), record({key: value})
    others = {"data", "tokenizer", "seed", "objective"} - {kind}
    flag = "--no-load-rng" if kind == "seed" else f"--allow-changed-run {kind}"
    with pytest.raises(TrainError, match=f"^iter_0000002 was saved .*or {flag} to continue"):
        compare_records(saved, current, PATH, 8, others)
    assert list(compare_records(saved, current, PATH, 8, [kind])) == [kind]


def test_weights_of_corpora_and_the_tokenizer_are_compared():
    with pytest.raises(
        TrainError, match=r"weights \[2.0, 1.0\] in the checkpoint and \[3.0, 1.0\] in this run"
    ):
        compare_records(record(), record({"data.data_path": ("3", "a", "1", "b")}), PATH, 8, ())
    with pytest.raises(
        TrainError, match=r"another tokenizer: fingerprint .* in the checkpoint and .* in this run"
    ):
        compare_records(record(), record((), NullTokenizer(256)), PATH, 8, ())


class HashedTokenizer(ByteTokenizer):
    fingerprint = "sha256:0123456789abcdef"


def test_a_record_has_12_digits_of_the_tokenizer_as_those_of_older_checkpoints():
    found = record((), HashedTokenizer())
    assert found["tokenizer"] == {"fingerprint": "sha256:0123456789ab"}


MAY_DIFFER = {
    "data.data_path": ("2", "moved/a", "1", "b"),
    "data.mmap_bin_files": False,
    "training.train_iters": 9,
    "training.micro_batch_size": 4,
    "training.deterministic_mode": True,
    "checkpoint.save": "out",
    "logging.log_interval": 1,
}


@pytest.mark.parametrize("key", MAY_DIFFER)
def test_layout_length_logging_and_paths_may_differ(key):
    assert compare_records(record(), record({key: MAY_DIFFER[key]}), PATH, 8, ()) == {}


def test_batch_size_schedules_may_differ_and_are_reported():
    stepped = {"training.global_batch_size": None, "training.train_iters": None}
    stepped |= {"training.train_samples": 80}
    saved, current = (
        record(stepped | {"training.step_batch_size_schedule": ("0:4", f"{step}:8")})
        for step in (32, 64)
    )
    found = compare_records(saved, current, PATH, 8, ())
    assert found == {
        "optimizer": "step_batch_size_schedule 0:4 32:8 in the checkpoint and 0:4 64:8 in this run"
    }


def test_learning_rates_may_differ_and_are_reported():
    for key in ("optimizer.lr", "optimizer.weight_decay", "schedule.lr_decay_iters"):
        found = compare_records(record(), record({key: 7}), PATH, 8, ())
        assert (
            list(found) == ["optimizer"]
            and " in the checkpoint and 7 in this run" in found["optimizer"]
        )
    compat = {"data.sample_order": "compat"}
    longer = record({**compat, "training.train_iters": 4})
    assert compare_records(record(compat), longer, PATH, 8, ()) == {
        "length": "samples 12 in the checkpoint and 16 in this run"
    }


def test_a_corpus_with_the_same_name_and_other_content_is_other_data():
    saved = record()
    Path("b.bin").write_bytes(b"abe")
    with pytest.raises(TrainError, match="other data: content "):
        compare_records(saved, record(), PATH, 8, ())


def test_corpora_without_a_record_of_their_content_are_compared_by_path():
    old, moved = record(), record({"data.data_path": ("2", "moved/a", "1", "b")})
    del old["data"]["content"]
    assert compare_records(old, record(), PATH, 8, ()) == {}
    with pytest.raises(TrainError, match="other data: data "):
        compare_records(old, moved, PATH, 8, ())
    old["data"]["content"] = ["one of two"]
    with pytest.raises(TrainError, match="other data: content "):
        compare_records(old, record(), PATH, 8, ())


def test_data_may_change_after_the_consumed_samples():
    Path("changes").write_text('[{"from_sample": 8, "data_path": "b"}]')
    later = record({"data.data_path_changes": "changes"})
    assert compare_records(record(), later, PATH, 8, ()) == {}
    with pytest.raises(TrainError, match=r"changes \[\] in the checkpoint and \[\[8, "):
        compare_records(record(), later, PATH, 9, ())


def test_an_invalid_record_is_refused_in_one_line():
    for damaged in (5, None, ["a"], "text"):
        with pytest.raises(TrainError, match="iter_0000002 is damaged: its record of the run has"):
            compare_records({"data": damaged}, record(), PATH, 8, ())


def test_only_the_seed_of_a_flat_record_is_compared():
    flat = {"data": ["corpus"], "split": None, "seq_length": 9, "seed": 1234, "order": "packed"}
    assert upgrade_record(record()) == record()
    assert upgrade_record({**flat, "seed": "x"}) == {}
    assert compare_records(upgrade_record(flat), record(), PATH, 8, ()) == {}
    with pytest.raises(TrainError, match="was saved with --seed 1234, but this run has --seed 5"):
        compare_records(upgrade_record(flat), record({"training.seed": 5}), PATH, 8, ())


@pytest.mark.parametrize("kind", ["data", "objective", "optimizer"])
def test_keys_that_only_one_version_records_are_not_compared(kind):
    old, new = record(), record()
    new[kind]["added"] = 1
    assert compare_records(old, new, PATH, 8, ()) == {}
    assert compare_records(new, old, PATH, 8, ()) == {}


def test_a_length_that_only_one_order_of_samples_records_is_not_compared():
    plain, compat = record(), record({"data.sample_order": "compat"})
    for saved, current in ((plain, compat), (compat, plain)):
        assert list(compare_records(saved, current, PATH, 8, ["data"])) == ["data"]


def test_a_local_corpus_beside_one_at_a_url_may_be_moved():
    saved = record({"data.data_path": ("2", "a", "1", "s3://bucket/c")})
    moved = record({"data.data_path": ("2", "moved/a", "1", "s3://bucket/c")})
    assert compare_records(saved, moved, PATH, 8, ()) == {}
    with pytest.raises(TrainError, match="other data: data "):
        other = record({"data.data_path": ("2", "moved/a", "1", "s3://bucket/d")})
        compare_records(saved, other, PATH, 8, ())


def test_replacement_data_is_identified_by_its_content():
    def changed(words, first=4):
        Path("changes").write_text(json.dumps([{"from_sample": first, "data_path": words}]))
        return record({"data.data_path_changes": "changes"})

    saved = changed("a")
    assert compare_records(saved, changed("moved/a"), PATH, 8, ()) == {}
    old = json.loads(json.dumps(saved))
    del old["data"]["changes"][0][2]  # older records have only the paths
    assert compare_records(old, saved, PATH, 8, ()) == {}
    for words in ("b", ["2", "a"]):
        with pytest.raises(TrainError, match="other data: changes "):
            compare_records(saved, changed(words), PATH, 8, ())
    with pytest.raises(TrainError, match="other data: changes "):
        compare_records(saved, changed("a", first=5), PATH, 8, ())
    Path("a.bin").write_bytes(b"abe")
    with pytest.raises(TrainError, match="changes "):
        compare_records({"data": saved["data"]}, changed("a"), PATH, 8, ())


@pytest.mark.parametrize("damaged", [5, [5], [["4", [["a"], None]]], [[4, 5]], [[4, [5, None]]]])
def test_a_damaged_change_of_data_is_refused_in_one_line(damaged):
    saved = record()
    saved["data"]["changes"] = damaged
    with pytest.raises(TrainError, match=r"^iter_0000002 is damaged: its record .* change of data"):
        compare_records(saved, record(), PATH, 8, ())


MIB = 1 << 20


@pytest.mark.parametrize(
    ("place", "noticed"),
    [
        *((0, True), (MIB - 1, True), (2 * MIB, True), (3 * MIB - 1, True)),
        *((MIB, False), (2 * MIB - 1, False)),  # reading whole corpora would take hours
    ],
)
def test_a_changed_byte_near_an_end_of_a_corpus_is_noticed(place, noticed):
    """The corpus has 3 MiB, of which the first and the last are read."""
    content = bytearray(3 * MIB)
    before = content_of_a(content)
    content[place] = 1
    assert (content_of_a(content) != before) == noticed
    assert content_of_a(content + b"\0") != before


def content_of_a(content):
    Path("a.bin").write_bytes(content)
    return corpora_identity(DataConfig(seq_length=4, data_path=("a",)))["content"]


def test_a_file_of_the_index_is_not_that_of_the_tokens():
    one = corpora_identity(DataConfig(seq_length=4, data_path=("a",)))["content"]
    Path("a.idx").rename("c.bin")
    Path("a.bin").rename("c.idx")
    Path("c.idx").write_bytes(b"abd")
    assert corpora_identity(DataConfig(seq_length=4, data_path=("c",)))["content"] != one
    Path("plain").write_bytes(b"x")
    found = corpora_identity(DataConfig(seq_length=4, data_path=("plain", "none")))
    assert found["content"][0] is not None and found["content"][1] is None
    assert len(found["content"][0]) == 16 and found["weights"] is None


def test_a_split_identifies_the_data_that_it_divides():
    divided = corpora_identity(DataConfig(seq_length=4, data_path=("a",), split="9,1,0"))
    assert divided["split"] == "9,1,0" and divided["seq_length"] == 4
    whole = corpora_identity(DataConfig(seq_length=4, train_data_path=("a",)))
    assert whole["split"] is None and whole["data"] == ["a"]
    mock = corpora_identity(DataConfig(seq_length=4, mock_data=True))
    assert mock["data"] == ["mock"] and mock["content"] == [None]


def test_the_tokenizer_and_the_update_rule_of_a_record():
    found = record()
    assert not uses_null_tokenizer(found) and recorded_rule(found) == "adam"
    assert uses_null_tokenizer(record((), NullTokenizer(256)))
    for damaged in ({}, {"tokenizer": {}}, {"tokenizer": {"fingerprint": None}}):
        assert not uses_null_tokenizer(damaged)
    for damaged in (None, {}, {"optimizer": 3}, {"optimizer": {"optimizer": 3}}):
        assert recorded_rule(damaged) == ""


def test_a_record_without_schedules_has_the_other_settings_of_the_optimizer():
    found = record({"optimizer.lr": 0.5, "schedule.lr_warmup_iters": 1})
    kept = without_schedules(found)
    dropped = found["optimizer"].keys() - kept["optimizer"].keys()
    assert {"lr", "min_lr", "lr_warmup_iters", "lr_decay_style", "weight_decay"} <= dropped
    assert {"optimizer", "global_batch_size", "clip_grad", "adam_beta1"} <= kept["optimizer"].keys()
    assert {name: part for name, part in found.items() if name != "optimizer"} == {
        name: part for name, part in kept.items() if name != "optimizer"
    }


@pytest.mark.parametrize(
    ("saved", "current", "remedy"),
    [
        ("lora", "other", "give --linear-product lora"),
        (
            "lora",
            "plain",
            "give --linear-product lora, or merge it into the weights first, with megatron-train "
            "merge",
        ),
        (
            "plain",
            "lora",
            "begin a new run with its weights, with --finetune and another --save folder",
        ),
    ],
)
def test_a_checkpoint_with_another_product_is_refused_with_the_remedy(saved, current, remedy):
    run = {"objective": {"linear_product": current}}
    with pytest.raises(TrainError) as caught:
        refuse_other_product(saved, run, PATH)
    assert str(caught.value) == (
        f"{PATH} was saved with --linear-product {saved}, but this run has {current}; {remedy}"
    )
    refuse_other_product(current, run, PATH)


@pytest.mark.parametrize("damaged", [None, 3, {}, {"objective": 3}, {"objective": {}}])
def test_a_run_without_a_record_of_its_product_has_plain_layers(damaged):
    assert recorded_product(damaged) == "plain"
    with pytest.raises(TrainError, match="has plain linear layers; there is nothing to merge"):
        build_recorded_products(damaged, PATH)


def test_recorded_settings_of_a_product_that_it_lacks_are_damage():
    run = {"objective": {"linear_product": "lora", "lora.no_such": 1}}
    with pytest.raises(TrainError, match=r"iter_0000002 is damaged: invalid settings .*no_such"):
        build_recorded_products(run, PATH)
    run["objective"] = {"linear_product": "lora", "lora.rank": 3, "task": "causal_lm"}
    assert build_recorded_products(run, PATH)


def test_settings_of_a_product_that_give_other_parameters_are_refused_by_flag():
    def run(rank, alpha=16.0):
        return {"objective": {"linear_product": "lora", "lora.rank": rank, "lora.alpha": alpha}}

    held = {
        "up.lora_a": SimpleNamespace(shape=(8, 4), group="model"),
        "up.lora_b": SimpleNamespace(shape=(6, 8), group="model"),
        "up.lora_a.exp_avg": SimpleNamespace(shape=(8, 4), group="optimizer"),
        "down.lora_a": SimpleNamespace(shape=(9, 9), group="optimizer"),
        "up.weight": SimpleNamespace(shape=(6, 4), group="model"),
    }
    saved = SimpleNamespace(path=PATH, tensors=held, values=lambda: {"run": run(8)})
    same = {"up.lora_a": (8, 4), "up.lora_b": (6, 8)}
    refuse_other_tensors(saved, same, run(8, alpha=1.0))  # which changes no parameter
    with pytest.raises(TrainError) as refused:
        refuse_other_tensors(saved, {"up.lora_a": (2, 4), "up.lora_b": (6, 2)}, run(2))
    assert str(refused.value) == (
        f"{PATH} has other parameters of --linear-product lora: --lora-rank 8 in the checkpoint "
        "and 2 in this run; give the settings of the checkpoint"
    )
    # Other shapes with equal settings have another reason, which is named elsewhere.
    refuse_other_tensors(saved, {"up.lora_a": (2, 4), "up.lora_b": (6, 2)}, run(8))


@pytest.mark.parametrize(("flags", "rank"), [("", 8), ("--lora-rank 3", 3)])
def test_a_record_has_the_settings_of_its_product(flags, rank):
    assert record_product(parse(MINIMAL)) == {"linear_product": "plain"}
    found = record_product(parse(f"{MINIMAL} --linear-product lora {flags}"))
    assert found["linear_product"] == "lora" and found["lora.rank"] == rank
    assert {key.partition(".")[0] for key in found} == {"linear_product", "lora"}
