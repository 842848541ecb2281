"""What layers count in steps: which layers count, and how reports show it, computed by hand."""

import math
from types import MappingProxyType

import pytest
import torch
from megatron_models import GPTConfig, Measure, Placement, find_kind
from megatron_parallel import Mesh
from megatron_train.tasks.gpt import GPTTask
from megatron_train.tasks.task import layer_values, unusable_layers, worst_layers

from .conftest import BigramTask


class Counting(BigramTask):
    """Layers 2, 5 and 7 count one value each, which three measures show."""

    counters = MappingProxyType({"two": 1, "five": 1, "seven": 1})

    def measures(self, counts):
        return {
            layer: (
                Measure("load", "largest load", counts[name][0], "largest"),
                Measure("entropy", "least entropy", counts[name][0], "smallest"),
                Measure("rows", "lost rows", 2 * counts[name][0], "largest", "raise the bound"),
            )
            for layer, name in ((2, "two"), (5, "five"), (7, "seven"))
        }


def test_measures_of_layers_by_hand():
    counts = {"two": [3.0], "five": [1.0], "seven": [3.0]}
    assert layer_values(Counting(), counts) == {
        "load_layer_2": 3.0,
        "load_layer_5": 1.0,
        "load_layer_7": 3.0,
        "entropy_layer_2": 3.0,
        "entropy_layer_5": 1.0,
        "entropy_layer_7": 3.0,
        "rows_layer_2": 6.0,
        "rows_layer_5": 2.0,
        "rows_layer_7": 6.0,
    }
    assert worst_layers(Counting(), counts) == {  # of equal layers, the first
        "largest load": (3.0, 2),
        "least entropy": (1.0, 5),
        "lost rows": (6.0, 2),
    }
    assert unusable_layers(Counting(), counts) == [
        "layer 2: 6 lost rows, raise the bound",
        "layer 5: 2 lost rows, raise the bound",
        "layer 7: 6 lost rows, raise the bound",
    ]


@pytest.mark.parametrize("order", [(1.0, 4.0, 2.0), (4.0, 1.0, 2.0), (2.0, 3.0, 5.0)])
def test_the_worst_layer_may_be_any_of_them(order):
    counts = {name: [value] for name, value in zip(("two", "five", "seven"), order, strict=True)}
    layers = dict(zip(order, (2, 5, 7), strict=True))
    found = worst_layers(Counting(), counts)
    assert found["largest load"] == (max(order), layers[max(order)])
    assert found["least entropy"] == (min(order), layers[min(order)])


def test_values_that_are_not_finite_are_never_the_worst():
    counts = {"two": [math.nan], "five": [2.0], "seven": [math.inf]}
    found = worst_layers(Counting(), counts)
    assert found["largest load"] == found["least entropy"] == (2.0, 5)


@pytest.mark.parametrize("read", [layer_values, worst_layers, unusable_layers])
def test_nothing_is_shown_without_counts_or_without_a_task_that_counts(read):
    assert not read(Counting(), {})  # its measures need every count
    assert not read(BigramTask(), {"two": [3.0]})
    assert not read(None, {"two": [3.0]})


@pytest.mark.parametrize(
    ("bound", "logging", "counting"),
    [(0.0, False, []), (0.0, True, [0, 1]), (2.0, False, [0, 1]), (2.0, True, [0, 1])],
)
def test_layers_count_for_a_report_or_if_their_rows_have_a_bound(bound, logging, counting):
    model = GPTConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        vocab_size=11,
        max_position_embeddings=8,
        num_experts=4,
        moe_ffn_hidden_size=8,
        moe_expert_rank_capacity_factor=bound,
    )
    stages = find_kind("gpt").build(model, Placement(Mesh.single(), dtype=torch.float32), seed=1)
    task = GPTTask(stages, None, per_layer_logging=logging)
    assert list(task.counters.values()) == [2 * 4 + 2] * len(counting)
    counts = {name: [1.0] * size for name, size in task.counters.items()}
    assert list(task.measures(counts)) == counting
