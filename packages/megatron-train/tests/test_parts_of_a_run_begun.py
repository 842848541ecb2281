"""Runs that begin with the weights of a checkpoint: what is loaded, and what keeps its values."""

from contextlib import nullcontext

import pytest
import torch
from megatron_ckpt import CheckpointError, CheckpointStore
from megatron_train.checkpointing import load_weights
from megatron_train.errors import TrainError

from .test_parts_of_a_run_assembled import built

LORA = {"objective": {"linear_product": "lora"}}


def parameters(trainer):
    return {name: p.detach().clone() for name, p in trainer.engine.stages.parameters.items()}


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """Returns a folder with a checkpoint of initial weights, and a newer one of others."""
    folder, trainer = tmp_path_factory.mktemp("run"), built("")
    store, model = CheckpointStore(folder), trainer.task.model_record
    saved = {}
    for iteration in (3, 5):
        state = {**trainer.engine.stages.views(), "run": {}}
        store.save(iteration, state, model=model)
        saved[iteration] = parameters(trainer)
        with torch.no_grad():
            for parameter in trainer.engine.stages.parameters.values():
                parameter.mul_(2.0)  # padding of the vocabulary stays 0
    return folder, saved


@pytest.mark.parametrize("iteration", [3, 5])
def test_weights_are_those_of_the_newest_or_of_the_named_checkpoint(held, iteration):
    folder, saved = held
    source = folder if iteration == 5 else folder / "iter_0000003"
    trainer = built("--ema-decay 0.9 --seed 7 --init-method-std 0.5")
    before = parameters(trainer)
    assert any(not torch.equal(before[name], saved[3][name]) for name in before)
    assert load_weights(trainer, source, {}) == (iteration, [])
    for name, values in saved[iteration].items():
        assert torch.equal(parameters(trainer)[name], values)
        assert torch.equal(trainer.averages.tensors[name].view(values.shape), values.float())
    assert trainer.iteration == 0 and trainer.optimizer.scalars()["steps"] == 0


def test_main_weights_follow_weights_in_bf16(held):
    folder, saved = held
    trainer = built("--bf16")
    load_weights(trainer, folder, {})
    for name, values in saved[5].items():
        assert torch.equal(parameters(trainer)[name], values.bfloat16())
        main = trainer.optimizer.main.tensors[name]
        assert torch.equal(main.view(values.shape).bfloat16(), values.bfloat16())


def test_adapters_that_a_checkpoint_lacks_keep_their_initial_values(held):
    folder, saved = held
    trainer = built("--linear-product lora")
    before = parameters(trainer)
    assert load_weights(trainer, folder, LORA) == (5, [])
    after = parameters(trainer)
    added = before.keys() - saved[5].keys()
    assert added and all(torch.equal(after[name], before[name]) for name in added)
    assert all(torch.equal(after[name], saved[5][name]) for name in after.keys() & saved[5].keys())


@pytest.mark.parametrize(
    ("saved", "run", "message"),
    [
        (LORA, {}, "was saved with --linear-product lora, but this run has plain; give --linear-p"),
        (LORA, LORA, ""),
        ({}, {}, ""),
    ],
)
def test_adapters_of_a_checkpoint_are_not_left_out(tmp_path, saved, run, message):
    trainer = built("")
    state = {**trainer.engine.stages.views(), "run": saved}
    CheckpointStore(tmp_path).save(2, state, model=trainer.task.model_record)
    refused = pytest.raises(TrainError, match=message) if message else nullcontext()
    with refused:
        assert load_weights(trainer, tmp_path, run) == (2, [])


def test_other_models_and_folders_without_a_checkpoint_are_refused(held, tmp_path):
    folder, _ = held
    with pytest.raises(TrainError, match="num_layers 2 in the checkpoint and 1 in this run"):
        load_weights(built("--num-layers 1"), folder, {})
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_weights(built(""), tmp_path, {})
    CheckpointStore(tmp_path).save(1, {"run": {}})
    with pytest.raises(TrainError, match="has no record of its model; load another checkpoint"):
        load_weights(built(""), tmp_path, {})
