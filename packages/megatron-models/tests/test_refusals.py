"""Wrong configurations are refused before any allocation, with the value, the rule and a remedy.

All cases run in one process that cannot import torch, so none of them can have allocated a tensor.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import megatron_models
import pytest
import refusals
from refusals.cases import CASES

SOURCE = Path(megatron_models.__file__).parent
CHECKING = (
    "components/fields.py",
    "components/residual.py",
    "layer_pattern.py",
    "components/heterogeneous/blocks.py",
    "components/moe/router_config.py",
    "components/moe/capacity_fields.py",
    *(
        f"components/{name}/config.py"
        for name in (
            *("attention", "attention_variant", "gated_delta_net", "heterogeneous"),
            *("heads", "latent_attention", "mamba", "moe", "multi_token"),
        )
    ),
    "components/rotary/config.py",
    *(
        f"components/{name}/spec.py"
        for name in (
            *("gated_delta_net", "norm", "mlp", "latent_attention", "moe", "relative_bias"),
            *("mamba", "sparse_attention"),
        )
    ),
    "models/bert/config.py",
    "models/causal_config.py",
    "models/encoder_decoder/config.py",
    *(f"models/hybrid/{name}.py" for name in ("config", "fields", "layers", "pattern")),
    "models/mamba/config.py",
    "models/gpt/config.py",
    "models/gpt/fields.py",
    "models/gpt/layers.py",
)
"""Files whose errors are all about a configuration or its layout."""
UNREACHABLE = {"is not the description of a mixer"}
"""Errors that no configuration causes."""


@pytest.fixture(scope="module")
def refused():
    """Returns the outcome of each case."""
    tooling = str(Path(refusals.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "refusals.process"],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": tooling},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_configuration_is_refused_without_torch(refused, name):
    message = refused[name]["message"]
    assert message is not None, "accepted"
    assert "\n" not in message
    for words in CASES[name].words.split("|"):
        assert words in message


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.fix or case.fixed_layout]
)
def test_what_the_error_advises_is_accepted(refused, name):
    assert refused[name]["mended"] is None


def test_every_check_of_a_configuration_has_a_case(refused):
    raised = {tuple(line) for case in refused.values() for line in case["lines"]}
    missing = [
        f"{name}:{node.lineno}"
        for name in CHECKING
        for node in ast.walk(ast.parse((SOURCE / name).read_text()))
        if isinstance(node, ast.Raise)
        and node.exc is not None
        and not any(words in ast.unparse(node) for words in UNREACHABLE)
        and (str(SOURCE / name), node.lineno) not in raised
    ]
    assert not missing
