"""Settings that only some update rules read, under the others."""

from dataclasses import fields

import pytest
from megatron_optim import OptimizerConfig, update_rules
from megatron_train.cli import main
from megatron_train.config.options import flags_of

RUN = (
    "pretrain gpt --num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 "
    "--micro-batch-size 1 --train-iters 2 --mock-data --vocab-size 50 --print-config"
)
FLAGS = flags_of(OptimizerConfig)
SHARED = [f.name for f in fields(OptimizerConfig) if f.metadata.get("read_by") == "update rule"]
READ = {
    "adam": {"adam_beta1", "adam_beta2", "adam_eps"},
    "muon": {"adam_beta1", "adam_beta2", "adam_eps"},  # by the rule of the other parameters
    "sgd": {"sgd_momentum"},
    "lion": set(),
    "adafactor": set(),
}


def test_the_rules_share_the_settings_of_adam_and_sgd():
    assert set(SHARED) == {"adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum"}
    assert READ.keys() <= update_rules().keys()


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("rule", READ)
def test_a_setting_that_the_rule_does_not_read_is_refused(rule, name, capsys):
    status = main([*RUN.split(), "--optimizer", rule, FLAGS[name], "0.25"])
    error = capsys.readouterr().err
    if name in READ[rule]:
        assert status == 0, error
    else:
        assert status == 1
        assert error == (
            f"megatron-train: error: {FLAGS[name]} has no effect: the update rule {rule} does not "
            "read it; leave it out\n"
        )


def test_a_recipe_keeps_its_settings_of_adam_for_runs_with_adam(capsys):
    words = [*RUN.split(), "--recipe", "llama-tiny", "--num-query-groups", "1"]
    assert main(words) == 0
    assert "adam_beta2: 0.98" in capsys.readouterr().out
    assert main([*words, "--optimizer", "lion"]) == 0
    assert "adam_beta2: 0.98" not in capsys.readouterr().out
    assert main([*words, "--optimizer", "lion", "--adam-beta2", "0.9"]) == 1
    assert "--adam-beta2 has no effect" in capsys.readouterr().err
