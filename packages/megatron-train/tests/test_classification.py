"""Scores of classifications, compared with their definitions over single samples."""

import math
import random

import numpy as np
import pytest
import torch
from megatron_models import EncoderOutput
from megatron_parallel import Mesh
from megatron_train.config.values import GivenValue, Values
from megatron_train.errors import TrainError
from megatron_train.tasks.classification import ClassificationTask
from megatron_train.tasks.classification_scores import scores
from megatron_train.tasks.classification_settings import (
    ClassificationSettings,
    with_classification_defaults,
)
from megatron_train.tasks.task import MicroBatch, reported_values
from torch.nn import functional


def drawn(classes: int, count: int = 200) -> tuple[list[int], list[int]]:
    """Returns labels and predictions that agree in half of the samples."""
    draw = random.Random(classes)
    labels = [draw.randrange(classes) for _ in range(count)]
    return labels, [n if draw.random() < 0.5 else draw.randrange(classes) for n in labels]


def counts(labels: list[int], predicted: list[int], classes: int) -> dict[str, list[float]]:
    pairs = list(zip(labels, predicted, strict=True))
    return {
        "hits": [float(sum(a == b == n for a, b in pairs)) for n in range(classes)],
        "predicted": [float(predicted.count(n)) for n in range(classes)],
        "labels": [float(labels.count(n)) for n in range(classes)],
    }


def test_the_scores_of_two_classes_equal_their_definitions():
    labels, predicted = drawn(2)
    found = scores(**counts(labels, predicted, 2))
    pairs = list(zip(labels, predicted, strict=True))
    true, false, missed = (sum(p == pair for p in pairs) for pair in ((1, 1), (0, 1), (1, 0)))
    precision, recall = true / (true + false), true / (true + missed)
    assert found.keys() == {"F1", "MCC"}
    assert found["F1"] == pytest.approx(2 * precision * recall / (precision + recall), rel=1e-12)
    assert found["MCC"] == pytest.approx(np.corrcoef(labels, predicted)[0, 1], rel=1e-12)


def test_the_scores_of_several_classes_equal_their_definitions():
    labels, predicted = drawn(4)
    found = scores(**counts(labels, predicted, 4))
    ours, theirs = (np.eye(4)[values] for values in (predicted, labels))
    both = np.mean((ours - ours.mean(0)) * (theirs - theirs.mean(0)), 0).sum()
    assert found["MCC"] == pytest.approx(both / np.sqrt(ours.var(0).sum() * theirs.var(0).sum()))
    each = []
    for number in range(4):
        chosen, real = ({i for i, n in enumerate(v) if n == number} for v in (predicted, labels))
        each.append(2 * len(chosen & real) / (len(chosen) + len(real)))
    assert found["macro F1"] == pytest.approx(sum(each) / 4)


def test_scores_without_a_prediction_or_a_sample():
    one_class = scores(hits=[5.0, 0.0], predicted=[8.0, 0.0], labels=[5.0, 3.0])
    assert one_class == {"F1": 0.0, "MCC": 0.0}
    assert all(map(math.isnan, scores([0.0] * 2, [0.0] * 2, [0.0] * 2).values()))


def test_a_class_that_is_neither_a_label_nor_predicted_has_the_score_0():
    found = scores(hits=[2.0, 1.0, 0.0], predicted=[2.0, 1.0, 0.0], labels=[2.0, 1.0, 0.0])
    assert found == {"macro F1": pytest.approx(2 / 3), "MCC": pytest.approx(1.0)}


class Stage:
    """Stands for the stage of a model."""

    mesh = Mesh.single()
    config = None


def test_the_task_counts_each_text_once():
    logits = torch.tensor([[2.0, 1.0, 0.5], [0.0, 0.1, 0.2], [1.0, 3.0, 2.0], [9.0, 0.0, 0.0]])
    classes, weights = torch.tensor([0, 0, 1, 0]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    batch = MicroBatch({"classes": classes, "weights": weights}, 4, 4)
    task = ClassificationTask([Stage()], None, 3)
    sums = task.loss(EncoderOutput(torch.zeros(1), logits), batch)
    counted = task.denominators([batch])
    assert sums.keys() == counted.keys() == {*task.losses, *task.metrics}
    found = reported_values(task, {name: float(v) for name, v in sums.items()}, counted)
    expected = functional.cross_entropy(logits[:3], classes[:3]).item()
    assert found["classification loss"] == pytest.approx(expected, rel=1e-6)
    assert found["accuracy"] == pytest.approx(2 / 3)
    # Class 0: 1 hit of 1 prediction and 2 labels; class 1: 1 of 1 and 1; class 2: none of 1 and 0.
    assert found["macro F1"] == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert found.keys() == {"classification loss", "accuracy", "macro F1", "MCC"}


@pytest.fixture
def table(tmp_path):
    """Returns the path of a table of 100 texts of three classes."""
    rows = "".join(f"text {n}\t{'abc'[n % 3]}\n" for n in range(100))
    (tmp_path / "t.tsv").write_text("text\tlabel\n" + rows)
    return str(tmp_path / "t.tsv")


def given(**values):
    return Values({key.replace("__", "."): GivenValue(v, "--x") for key, v in values.items()})


def test_classes_and_lengths_follow_from_the_texts(table):
    values = given(
        data__data_path=(table,),
        data__split="80,20,0",
        classification__epochs=3,
        training__micro_batch_size=6,
    )
    found = with_classification_defaults(values)
    assert found.get("classification.class_names") == ("a", "b", "c")
    assert found.get("model.num_labels") == 3 and found.get("model.task_head") == "classification"
    assert found.get("training.train_samples") == 240
    assert found.get("evaluation.eval_iters") == 4  # 20 texts in batches of 6


def test_given_values_are_kept_and_those_of_the_checkpoint_replaced(table):
    origins = {"model.task_head": "the checkpoint x", "model.num_labels": "--num-labels"}
    model = {"model.task_head": "none", "model.num_labels": 7}
    values = Values({key: GivenValue(model[key], origins[key]) for key in model}).updated(
        given(
            data__train_data_path=(table,),
            training__train_iters=5,
            evaluation__eval_iters=9,
            classification__class_names=("c", "b", "a"),
        )
    )
    found = with_classification_defaults(values)
    assert found.get("model.task_head") == "classification" and found.get("model.num_labels") == 7
    assert found.get("classification.class_names") == ("c", "b", "a")
    assert "training.train_samples" not in found.given and found.get("evaluation.eval_iters") == 9


@pytest.mark.parametrize("names", [("a",), ("a", "a")])
def test_class_names_must_differ(names):
    with pytest.raises(TrainError, match="--class-names"):
        ClassificationSettings(class_names=names)
