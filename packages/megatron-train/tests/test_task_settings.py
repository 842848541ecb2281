"""Settings of tasks: their defaults and limits, what follows from them, and what is refused."""

from contextlib import nullcontext
from dataclasses import FrozenInstanceError, fields
from types import SimpleNamespace

import pytest
from megatron_data.datasets import FIMConfig, MaskingConfig
from megatron_train.config.values import GivenValue, Values
from megatron_train.errors import TrainError
from megatron_train.mock_data import MockDataset
from megatron_train.tasks.classification_settings import (
    ClassificationSettings,
    check_classification,
    with_classification_defaults,
)
from megatron_train.tasks.gpt_checks import check_fim, check_logits
from megatron_train.tasks.kinds import TaskKind
from megatron_train.tasks.masking import MaskingSettings
from megatron_train.tasks.sentences import check_sentences, with_sentence_defaults
from megatron_train.tasks.t5_kind import SpanSettings, check_t5
from megatron_train.tasks.task import MicroBatch


def given(**values):
    return Values({key.replace("__", "."): GivenValue(v, "--x") for key, v in values.items()})


def run(*sections, task="bert", **parts):
    """Returns a stand-in for a run with these sections and parts, such as ``data_mock_data``."""
    found = SimpleNamespace(task=task, section=lambda kind: {type(s): s for s in sections}[kind])
    found.data = SimpleNamespace(
        mock_data=False, tokenizer="x", sample_order="compat", fim_data=False, seq_length=32
    )
    found.model = SimpleNamespace(
        task_head="classification",
        num_labels=2,
        predicts_tokens=True,
        embedding=SimpleNamespace(max_position_embeddings=32),
    )
    found.training = SimpleNamespace(train_iters=None)
    found.layout, found.placement = SimpleNamespace(tp=1), SimpleNamespace(sequence_parallel=False)
    for key, value in parts.items():
        part, _, name = key.partition("_")
        setattr(getattr(found, part), name, value)
    return found


def test_defaults_of_masking_are_those_of_megatron():
    bert = {"probability": 0.15, "max_ngram": 3, "whole_words": True, "longer_ngrams": False}
    bert |= {"geometric": False, "permutation": False}
    assert MaskingSettings().masking() == MaskingConfig(**bert)
    t5 = bert | {"max_ngram": 10, "geometric": True}
    assert SpanSettings().masking() == MaskingConfig(**t5)
    assert MaskingSettings().short_seq_prob == SpanSettings().short_seq_prob == 0.1
    assert SpanSettings().decoder_seq_length == 128
    other = MaskingSettings(mask_whole_words=False, mask_longer_ngrams=True, mask_permutation=True)
    wanted = {"whole_words": False, "longer_ngrams": True, "permutation": True}
    assert other.masking() == MaskingConfig(**bert | wanted)


@pytest.mark.parametrize(
    ("kind", "accepted", "refused", "message"),
    [
        (MaskingSettings, {"mask_prob": 0.01}, {"mask_prob": 0}, "between 0 and 1, got 0"),
        (MaskingSettings, {"mask_prob": 0.99}, {"mask_prob": 1}, "between 0 and 1, got 1"),
        (MaskingSettings, {"short_seq_prob": 0}, {"short_seq_prob": -0.1}, r"\[0, 1\], got -0.1"),
        (MaskingSettings, {"short_seq_prob": 1}, {"short_seq_prob": 1.1}, r"\[0, 1\], got 1.1"),
        (MaskingSettings, {"mask_max_ngram": 1}, {"mask_max_ngram": 0}, "--mask-max-ngram must be"),
        (
            MaskingSettings,
            {"mask_geometric": True},
            {"mask_geometric": True, "mask_permutation": True},
            "--mask-geometric and --mask-permutation exclude each other; give one",
        ),
        (
            SpanSettings,
            {"decoder_seq_length": 1},
            {"decoder_seq_length": 0},
            "--decoder-seq-length must be positive, got 0",
        ),
        (
            SpanSettings,
            {"mask_geometric": False},
            {"mask_geometric": False, "mask_permutation": True},
            "--mask-permutation does not work with spans; leave it out",
        ),
        (SpanSettings, {"mask_prob": 0.5}, {"mask_prob": 1}, "--mask-prob must be between"),
        (
            ClassificationSettings,
            {"class_names": ("a", "b")},
            {"class_names": ("a", "b", "a")},
            "--class-names a b a: give at least two names, each of them once",
        ),
        (ClassificationSettings, {"epochs": 1}, {"epochs": 0}, "--epochs must be positive, got 0"),
    ],
)
def test_limits_of_settings_of_tasks(kind, accepted, refused, message):
    kind(**accepted)
    with pytest.raises(TrainError, match=message):
        kind(**refused)


@pytest.mark.parametrize(
    ("lengths", "parts", "message"),
    [
        ((4, 4), {}, ""),
        ((3, 4), {}, "--seq-length 3 has no room for text beside the special tokens; .* least 4"),
        ((4, 3), {}, "--decoder-seq-length 3 has no room .* use at least 4"),
        ((32, 32), {}, ""),
        ((33, 32), {}, "--seq-length 33 exceeds --max-position-embeddings 32"),
        ((32, 33), {}, "--decoder-seq-length 33 exceeds --max-position-embeddings 32"),
        ((9, 7), {"layout_tp": 2}, ""),
        ((8, 4), {"layout_tp": 2, "placement_sequence_parallel": True}, ""),
        (
            (9, 8),
            {"layout_tp": 2, "placement_sequence_parallel": True},
            "--seq-length 9 is not divisible by --tensor-model-parallel-size 2, .* use 8$",
        ),
        (
            (8, 7),
            {"layout_tp": 8, "placement_sequence_parallel": True},
            "--decoder-seq-length 7 is not divisible .* use 8$",
        ),
    ],
)
def test_lengths_of_both_texts(lengths, parts, message):
    seq_length, decoder = lengths
    made = run(SpanSettings(decoder_seq_length=decoder), data_seq_length=seq_length, **parts)
    refused = pytest.raises(TrainError, match=message) if message else nullcontext()
    with refused:
        check_t5(made)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"data__vocab_file": "v"}, "BertWordPieceLowerCase"),
        ({"data__vocab_file": "v", "data__merge_file": "m"}, None),
        ({"data__tokenizer_model": "t"}, None),
        ({"data__vocab_file": "v", "data__tokenizer_model": "t"}, None),
        ({"data__vocab_file": "v", "data__tokenizer_type": "ByteTokenizer"}, "ByteTokenizer"),
        ({}, None),
    ],
)
def test_a_vocabulary_alone_is_one_of_lower_case_word_pieces(values, kind):
    found = with_sentence_defaults(given(**values), "bert")
    assert found.get("data.tokenizer_type") == kind
    assert found.get("data.sample_order") == "compat"
    assert found.given["data.sample_order"].origin == "the task bert"


def test_sentences_need_a_corpus_a_tokenizer_and_megatrons_order():
    check_sentences(run())
    for changes, message in (
        ({"data_mock_data": True}, "bert does not work with --mock-data, .*; give --data-path"),
        ({"data_tokenizer": None}, "bert needs the word pieces of a tokenizer; give --vocab-file"),
        ({"data_sample_order": "packed"}, "--sample-order packed does not work .*; give compat or"),
    ):
        with pytest.raises(TrainError, match=message):
            check_sentences(run(**changes))


def test_a_classification_needs_texts_a_tokenizer_and_as_many_labels_as_classes():
    names = ClassificationSettings(class_names=("a", "b"))
    check_classification(run(names))
    check_classification(run(names, training_train_iters=3))
    epochs = ClassificationSettings(class_names=("a", "b"), epochs=2)
    check_classification(run(epochs))
    unknown, many = ClassificationSettings(), ClassificationSettings(class_names=(*"abcdefghijkl",))
    for settings, changes, message in (
        (names, {"model_task_head": "regression"}, "--task-head regression does not fit"),
        (names, {"data_mock_data": True}, "does not work with --mock-data, which has no labels"),
        (names, {"data_tokenizer": None}, "needs a tokenizer for its texts; give --tokenizer-mod"),
        (unknown, {}, "the classes are unknown; give --class-names"),
        (names, {"model_num_labels": 3}, "--num-labels 3 does not fit the 2 classes a, b; use 2"),
        (many, {}, "does not fit the 12 classes a, b, c, d, e, f, g, h, i, j; use 12, or leave"),
        (epochs, {"training_train_iters": 3}, "--epochs and --train-iters exclude each other"),
    ):
        with pytest.raises(TrainError, match=message):
            check_classification(run(settings, **changes))


@pytest.fixture
def tables(tmp_path):
    """Returns values with 6 texts of two classes to train on and 5 texts to validate on."""
    paths = {}
    for name, count in (("train", 6), ("valid", 5)):
        rows = "".join(f"text {n}\t{'ab'[n % 2]}\n" for n in range(count))
        (tmp_path / name).with_suffix(".tsv").write_text("text\tlabel\n" + rows)
        paths[f"data__{name}_data_path"] = (str(tmp_path / f"{name}.tsv"),)
    return paths


NAMES = {"classification__class_names": ("a", "b", "c")}


@pytest.mark.parametrize(
    ("values", "names", "samples", "iters"),
    [
        (NAMES | {"training__train_iters": 3}, 3, None, None),
        (NAMES | {"training__train_iters": 3, "training__micro_batch_size": 2}, 3, None, 3),
        (
            {"training__micro_batch_size": 2, "training__global_batch_size": 4},
            2,
            None,
            2,
        ),
        (NAMES | {"evaluation__eval_iters": 1, "classification__epochs": 4}, 3, 24, 1),
        ({"evaluation__eval_iters": 1, "training__train_iters": 3}, 2, None, 1),
        ({"classification__epochs": 4, "training__train_samples": 9}, 2, 9, None),
        ({"classification__epochs": 4, "training__train_iters": 9}, 2, None, None),
    ],
)
def test_values_that_follow_from_texts(tables, values, names, samples, iters):
    found = with_classification_defaults(given(**tables, **values))
    assert len(found.get("classification.class_names")) == found.get("model.num_labels") == names
    assert found.get("training.train_samples") == samples
    assert found.get("evaluation.eval_iters") == iters


def test_tables_are_read_only_if_a_value_follows_from_them():
    missing = {"data__data_path": ("nowhere.tsv",), "evaluation__eval_iters": 1}
    known = missing | NAMES | {"training__train_iters": 3}
    assert with_classification_defaults(given(**known)).get("model.num_labels") == 3
    for without in ("evaluation__eval_iters", "classification__class_names"):
        with pytest.raises(ValueError, match=r"nowhere\.tsv"):
            with_classification_defaults(given(**{k: v for k, v in known.items() if k != without}))
    unknown = with_classification_defaults(given(training__train_iters=3, classification__epochs=2))
    assert "classification.class_names" not in unknown.given
    assert "training.train_samples" not in unknown.given


def test_filling_in_the_middle_needs_its_flag_and_a_tokenizer():
    plain, split = FIMConfig(), FIMConfig(split_sample="<split>", fragment_rate=0.25)
    check_fim(run(plain))
    check_fim(run(plain, data_tokenizer=None))
    check_fim(run(plain, data_fim_data=True))
    check_fim(run(split, data_fim_data=True))
    for settings, changes, message in (
        (plain, {"data_fim_data": True, "data_tokenizer": None}, "--fim-data needs a tokenizer"),
        (split, {}, "needs --fim-data; give both, or leave it out"),
        (
            FIMConfig(fragment_rate=0.25),
            {"data_fim_data": True},
            "--fim-fragment-rate has no effect without --fim-split-sample",
        ),
    ):
        with pytest.raises(TrainError, match=message):
            check_fim(run(settings, **changes))
    with pytest.raises(TrainError, match="a model with --task-head has no logits of them"):
        check_logits(run(model_predicts_tokens=False))
    check_logits(run())


@pytest.mark.parametrize(
    "part",
    [
        TaskKind("mine", "for this test", "t:a", "t:b"),
        MaskingSettings(),
        SpanSettings(),
        ClassificationSettings(),
        MicroBatch({}, 1, 2),
        MockDataset(1, 2, 3, 4, 0),
    ],
    ids=lambda part: type(part).__name__,
)
def test_descriptions_of_tasks_and_samples_cannot_be_changed(part):
    for entry in fields(part):
        with pytest.raises(FrozenInstanceError):
            setattr(part, entry.name, None)


def test_micro_batches_are_equal_only_to_themselves():
    """Tensors have no single answer to whether they are equal."""
    one, other = (MicroBatch({}, 1, 2) for _ in range(2))
    assert one == one != other and len({one, other}) == 2


def test_a_task_without_samples_for_a_proof_says_how_to_name_them():
    assert TaskKind("mine", "for this test", "t:a", "t:b").model_kinds is None
    with pytest.raises(
        TrainError, match=r"mine has no samples for a proof; .* TaskKind.proof_data"
    ):
        TaskKind("mine", "for this test", "t:a", "t:b").open_proof_data(None)
    made = TaskKind("mine", "for this test", "t:a", "t:b", proof_data="builtins:repr")
    assert made.open_proof_data("run") == "'run'"
