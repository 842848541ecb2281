"""Checkpoints that earlier code wrote load, and continue as that code did.

`written_before/` holds three small models after 5 of 8 steps in float64, each with the settings of
its run, and `losses.json` what the code that wrote them got in steps 6 to 8. It was written before
records of models had a kind and a version.
"""

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
from megatron_ckpt import find_checkpoint
from megatron_models import config_of, parameter_shapes
from megatron_train import read_records

FOLDER = Path(__file__).parent / "written_before"
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
        for loss, value in losses.items():  # on other CPUs sums are added up in another order
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
