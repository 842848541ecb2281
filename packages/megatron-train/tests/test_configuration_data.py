"""The section of the data: corpora, tokenizer, and settings that exclude each other."""

import pytest
from megatron_train.config.data import DataConfig
from megatron_train.errors import TrainError

CORPUS = {"data_path": ("corpus",)}
TOKENIZER = {"tokenizer_type": "ByteTokenizer"}
INDEPENDENT = {"reset_position_ids": True, "reset_attention_mask": True}
MOCK = {"mock_data": True} | TOKENIZER
SFT = {"sft": True} | TOKENIZER | INDEPENDENT
LINES = {"data_path": ("0.5", "corpus", "0.5", "talks.jsonl")} | SFT


def refusal(**settings):
    with pytest.raises(TrainError) as caught:
        DataConfig(8, **settings)
    return str(caught.value)


def test_a_corpus_is_needed_for_training():
    for given in (CORPUS, MOCK, {"train_data_path": ("a",)}):
        assert DataConfig(8, **given)
    for given in ({}, {"valid_data_path": ("a",)}, {"test_data_path": ("a",)}):
        assert refusal(**given) == ("no corpus: give --data-path, --train-data-path or --mock-data")


@pytest.mark.parametrize("name", ["train", "valid", "test"])
def test_a_corpus_of_all_splits_excludes_those_of_one(name):
    assert refusal(**CORPUS, **{f"{name}_data_path": ("a",)}) == (
        f"--data-path, which --split divides, and --{name}-data-path exclude each other; give one "
        "of them"
    )


def test_corpora_are_those_of_all_splits_or_of_each():
    assert DataConfig(8, **CORPUS).corpora == ("corpus",)
    assert DataConfig(8, train_data_path=("a",), test_data_path=("b", "c")).corpora == {
        "train": ("a",),
        "valid": None,
        "test": ("b", "c"),
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, ("a",)) for name in ("data_path", "train_data_path", "valid_data_path")),
        *((name, True) for name in ("sft", "fim_data", "eod_mask_loss", *INDEPENDENT)),
        *(("test_data_path", ("a",)), ("data_path_changes", "changes.json")),
    ],
)
def test_synthetic_samples_have_no_documents(name, value):
    flag = f"--{name.replace('_', '-')}"
    assert refusal(**MOCK, **{name: value}) == (
        f"{flag} does not work with --mock-data, which has no documents; give one of them"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("eod_mask_loss", True), ("fim_data", True)),
        *(("data_path_changes", "changes.json"), ("data_cache_path", "cache")),
    ],
)
def test_conversations_exclude_what_documents_have(name, value):
    assert DataConfig(8, **CORPUS, **TOKENIZER, **{name: value})
    flag = f"--{name.replace('_', '-')}"
    assert refusal(**CORPUS, **SFT, **{name: value}) == (
        f"{flag} does not work with --sft, whose samples are conversations; leave it out"
    )


@pytest.mark.parametrize("name", INDEPENDENT)
def test_conversations_are_independent_and_need_a_tokenizer(name):
    assert DataConfig(8, **CORPUS, **SFT)
    flag = f"--{name.replace('_', '-')}"
    assert refusal(**CORPUS, **SFT | {name: False}).startswith(f"--sft needs {flag}: the convers")
    assert refusal(**CORPUS, **INDEPENDENT | {name: False}).endswith(
        " needs a tokenizer with an end-of-document token; give --tokenizer-model"
    )


@pytest.mark.parametrize(
    "name", ["max_document_bytes", "max_template_steps", "max_template_characters"]
)
def test_limits_are_for_conversations_in_json_lines(name):
    assert getattr(DataConfig(8, **LINES, **{name: 1}), name) == 1
    flag = f"--{name.replace('_', '-')}"
    assert refusal(**LINES, **{name: 0}) == f"{flag} must be positive, got 0"
    for given in (LINES | {"sft": False}, CORPUS | SFT, CORPUS | TOKENIZER):
        assert refusal(**given, **{name: 1}).startswith(
            f"{flag} limits what --sft reads from JSON lines, but no corpus is such a file; "
        )


@pytest.mark.parametrize("name", ["data_path", "train_data_path"])
def test_any_corpus_may_be_a_file_of_conversations(name):
    for paths, lines in ((("a", "b"), False), (("a", "b.jsonl"), True), (("0.5", "c.json"), True)):
        assert DataConfig(8, **{name: paths}).holds_conversation_lines == lines
    with_valid = DataConfig(8, train_data_path=("a",), valid_data_path=("b.jsonl",))
    assert with_valid.holds_conversation_lines


def test_changes_of_the_corpus_need_samples_that_are_computed_one_by_one():
    changes = CORPUS | {"data_path_changes": "changes.json"}
    for order in ("stateless", "packed"):
        assert DataConfig(8, **changes, sample_order=order)
    assert DataConfig(8, **CORPUS, sample_order="compat")
    assert refusal(**changes, sample_order="compat").startswith(
        "--data-path-changes does not work with --sample-order compat, which is computed for a "
    )


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({}, None),
        (TOKENIZER, "ByteTokenizer"),
        ({"tokenizer_model": "folder"}, "HuggingFaceTokenizer"),
        ({"vocab_file": "v.json", "merge_file": "m.txt"}, "GPT2BPETokenizer"),
        ({"tokenizer_type": "NullTokenizer"}, "NullTokenizer"),
    ],
)
def test_the_kind_of_a_tokenizer_is_given_or_that_of_its_files(given, kind):
    found = DataConfig(8, **CORPUS, **given)
    assert found.tokenizer == kind
    assert found.tokenizer_settings == {
        name: value for name, value in given.items() if name != "tokenizer_type"
    }


def test_lengths_and_counts_of_the_data_have_limits():
    assert DataConfig(1, **CORPUS, num_workers=0).num_workers == 0
    assert refusal(**CORPUS, num_workers=-1) == "--num-workers must not be negative, got -1"
    with pytest.raises(TrainError, match="--seq-length must be positive, got 0"):
        DataConfig(0, **CORPUS)
