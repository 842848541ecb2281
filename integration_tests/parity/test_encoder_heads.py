"""The heads of encoders equal those of transformers' classes, in both directions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from families.case import cases
from families.parity import LIMIT, gradients, logits, our_model, round_trip
from families.theirs import their_model, write
from megatron_ckpt import CheckpointError

LABELS = {"id2label": {n: f"LABEL_{n}" for n in range(4)}}
CLASSES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("bert", "BertForMaskedLM", {}),
    ("bert", "BertForNextSentencePrediction", {}),
    ("bert", "BertForSequenceClassification", {}),
    ("bert", "BertForSequenceClassification", LABELS),
    ("bert", "BertForSequenceClassification", {"problem_type": "regression"}),
    ("bert", "BertForMultipleChoice", {}),
    ("roberta", "RobertaForSequenceClassification", LABELS),
)
SMALL = {"num_hidden_layers": 2}
BY_CLASS = pytest.mark.parametrize(
    ("family", "model_class", "changes"),
    [pytest.param(*each, id=f"{each[1]}-{at}") for at, each in enumerate(CLASSES)],
)


@BY_CLASS
def test_a_class_has_equal_outputs_and_gradients(
    family: str, model_class: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    case = replace(cases()[family], model_class=model_class)
    assert logits(case, SMALL | changes, tmp_path / "a") <= LIMIT
    assert gradients(case, SMALL | changes, tmp_path / "b") <= LIMIT


@BY_CLASS
def test_a_class_is_exported_as_it_was(
    family: str, model_class: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    case = replace(cases()[family], model_class=model_class)
    assert round_trip(case, SMALL | changes, tmp_path) <= LIMIT


def test_a_file_with_former_names_of_norms_is_read_alike(tmp_path: Path) -> None:
    """google-bert/bert-base-uncased names their parameters gamma and beta."""
    theirs = their_model(cases()["bert"], SMALL)
    folder = write(theirs, tmp_path / "theirs")
    expected = our_model(folder).state_dict()
    tensors = {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}
    endings = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    former = {}
    for name, tensor in tensors.items():
        for present, ending in endings.items():
            name = name.replace(present, ending)
        former[name] = tensor
    assert sum(name.endswith(("gamma", "beta")) for name in former) == 2 * (2 * 2 + 2)
    save_file(former, folder / "model.safetensors")
    found = our_model(folder).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    name = "bert.embeddings.LayerNorm.weight"
    save_file({**former, name: tensors[name].clone()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="two names of one tensor; remove one"):
        our_model(folder)


def test_heads_that_the_class_does_not_read_are_left_out(tmp_path: Path) -> None:
    """A file of both heads may name the class with one: google-bert/bert-base-uncased does."""
    theirs = their_model(cases()["bert"], SMALL)
    folder = write(theirs, tmp_path / "theirs", architectures=["BertForMaskedLM"])
    model = our_model(folder)
    assert model.sequence_head is None and model.lm_head is not None
    folder = write(theirs, tmp_path / "other", architectures=["BertForTokenClassification"])
    with pytest.raises(CheckpointError, match="no family reads BertForTokenClassification"):
        our_model(folder)
