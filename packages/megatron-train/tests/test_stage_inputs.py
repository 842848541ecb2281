"""What tasks give a stage: dropout in training steps only, positions of tokens that follow."""

import pytest
import torch
from megatron_models import (
    Bert,
    BertConfig,
    EncoderDecoder,
    EncoderDecoderConfig,
    GPTConfig,
    Placement,
    gpt_chunks,
)
from megatron_parallel import Mesh
from megatron_train.tasks.bert import BertTask
from megatron_train.tasks.gpt import GPTTask
from megatron_train.tasks.staged import StagedTask
from megatron_train.tasks.t5 import T5Task

from .test_masked_losses import SIZES, batch

PLACEMENT = Placement(Mesh.single())


def task(name: str, hidden: float, attention: float) -> StagedTask:
    rates = {"hidden_dropout": hidden, "attention_dropout": attention}
    if name == "bert":
        return BertTask([Bert(BertConfig(**SIZES), PLACEMENT)], None, **rates)
    if name == "t5":
        model = EncoderDecoder(EncoderDecoderConfig(**SIZES), PLACEMENT)
        return T5Task([model], None, **rates)
    return GPTTask(gpt_chunks(GPTConfig(**SIZES), PLACEMENT), None, **rates)


@pytest.mark.parametrize("name", ["gpt", "bert", "t5"])
@pytest.mark.parametrize("rates", [(0.25, 0.0), (0.0, 0.5)])
def test_training_steps_have_dropout_and_evaluations_none(name, rates):
    made = task(name, *rates)
    dropout = made.stage_inputs(batch(name, 1), 0, 3)["dropout"]
    assert (dropout.hidden, dropout.attention) == rates
    assert made.stage_inputs(batch(name, 1), 0, None).get("dropout") is None
    assert task(name, 0.0, 0.0).stage_inputs(batch(name, 1), 0, 3).get("dropout") is None


@pytest.mark.parametrize("axes", [1, 3])
def test_tokens_that_follow_have_the_positions_of_their_documents(axes):
    """An embedding of a position takes the first axis, that of time."""
    stages = gpt_chunks(GPTConfig(**SIZES, mtp_num_layers=2), PLACEMENT)
    made = GPTTask(stages, None, reset_position_ids=True)
    time = torch.tensor([[0, 1, 2, 0, 1, 2]] * 3, dtype=torch.int32)
    positions = time if axes == 1 else torch.stack([time, time + 10, time + 20], -1)
    inputs = made.stage_inputs(batch("gpt", 1).with_fields(positions=positions), 0, 1)
    future = inputs["future"].positions
    assert future[:, :, 0].tolist() == [[1, 2, 0, 1, 2, 0]] * 3  # 0 after the end
    assert future[:, :, 1].tolist() == [[2, 0, 1, 2, 0, 0]] * 3
