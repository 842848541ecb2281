"""Checkpoints of earlier versions load, and continue with the same losses.

`older_checkpoints/` contains three small models after 5 of 8 steps in float64, each with the
settings of its run. `losses.json` contains the losses of the earlier code in steps 6 to 8. The
model records of these checkpoints have no kind and no version.
"""

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
from megatron_ckpt import find_checkpoint
from megatron_models import config_of, parameter_shapes
from megatron_train import read_records

FOLDER = Path(__file__).parent / "older_checkpoints"
LOSSES = json.loads((FOLDER / "losses.json").read_text())


@pytest.mark.parametrize("name", LOSSES)
def test_a_run_continues_from_a_checkpoint_of_earlier_code(name, run_command, tmp_path):
    run = tmp_path / name
    shutil.copytree(FOLDER / name, run)
    options = f"--config {run}/config.yaml --load {run} --save {run}"
    run_command(tmp_path, f"megatron-train pretrain gpt {options}")
    found = {record["iteration"]: record for record in read_records(run / "metrics.jsonl").train}
    assert found.keys() == {int(step) for step in LOSSES[name]}
    for step, losses in LOSSES[name].items():
        for loss, value in losses.items():  # the order of summation depends on the CPU
            assert found[int(step)][loss] == pytest.approx(value, rel=1e-11), (step, loss)


@pytest.mark.parametrize("name", LOSSES)
def test_the_record_of_earlier_code_is_read(name):
    before = find_checkpoint(FOLDER / name)
    assert before.model is not None
    assert (before.model.kind, before.model.version) == ("gpt", 0)
    config = config_of(before.model)
    since = {f.name: f.default for f in fields(config) if f.name not in before.model.config}
    assert config.to_dict() == {**before.model.config, **since}
    stored = {key.removeprefix("model."): tensor for key, tensor in before.tensors.items()}
    shapes = parameter_shapes(config)
    assert {n: tuple(stored[n].shape) for n in shapes} == shapes
