"""Factors of learning rate and weight decay by the names of parameters."""

import pytest
import torch
from megatron_optim import OptimError, Optimizer, OptimizerConfig
from megatron_parallel import Mesh, ParallelLayout, Sharding, TrainableParameters
from megatron_parallel.testing import WorkerPool
from torch import nn

TABLE = {
    "embedding.word.weight": Sharding((6, 4), vocabulary=True),
    "embedding.position.weight": Sharding((5, 4)),
    "layers.0.attention.q_norm.weight": Sharding((3,)),
    "layers.0.mlp.up.weight": Sharding((4, 3)),
    "layers.0.mlp.up.bias": Sharding((4,)),
    "layers.1.mlp.up.weight": Sharding((4, 3)),
    "output.weight": Sharding((6, 4), vocabulary=True),
}
LR, DECOUPLED, DECAY = 0.01, 0.003, 0.1


def updated(config: OptimizerConfig, decoupled: float | None = None) -> dict[str, torch.Tensor]:
    """Returns the parameters after a step of plain SGD, from values and gradients of 1 and 2."""
    parameters = {name: nn.Parameter(torch.ones(cut.shape).double()) for name, cut in TABLE.items()}
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, 2.0)
    optimizer = Optimizer(TrainableParameters(parameters, TABLE, Mesh.single()), config)
    optimizer.step(LR, DECAY, decoupled)
    return {name: parameter.detach() for name, parameter in parameters.items()}


def sgd(**settings: object) -> OptimizerConfig:
    return OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, clip_grad=0.0, **settings)


CASES = {
    "none": ({}, {}, {}),
    "later patterns prevail": (
        {"lr_mult": ("*.mlp.*=0.5", "layers.1.*=3")},
        {"layers.0.mlp.up.weight": 0.5, "layers.0.mlp.up.bias": 0.5, "layers.1.mlp.up.weight": 3.0},
        {},
    ),
    "decay replaces the default": (
        {"weight_decay_mult": ("*.bias=2", "output.*=0")},
        {},
        {"layers.0.mlp.up.bias": 2.0, "output.weight": 0.0},
    ),
    "norms of queries and keys": (
        {"apply_wd_to_qk_layernorm": True},
        {},
        {"layers.0.attention.q_norm.weight": 1.0},
    ),
    "embeddings": (
        {"embedding_weight_decay": False, "weight_decay_mult": ("*position*=0.5",)},
        {},
        {"embedding.word.weight": 0.0, "embedding.position.weight": 0.5},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("decoupled", [None, DECOUPLED])
def test_factors_by_name_change_rate_and_decay_of_a_step(
    case: str, decoupled: float | None
) -> None:
    settings, rates, decays = CASES[case]
    for name, value in updated(sgd(**settings), decoupled).items():
        lr = decoupled if decoupled and TABLE[name].vocabulary else LR
        decay = decays.get(name, float(len(TABLE[name].shape) > 1))
        expected = 1.0 - lr * rates.get(name, 1.0) * (2.0 + DECAY * decay)
        torch.testing.assert_close(value, torch.full_like(value, expected), rtol=0, atol=1e-15)


@pytest.mark.parametrize("word", ["embedding", "=2", "a=", "a=b", "a=-1", "a=inf", "{x}"])
@pytest.mark.parametrize("field", ["lr_mult", "weight_decay_mult"])
def test_text_that_is_no_factor_of_a_pattern_is_one_line(field: str, word: str) -> None:
    with pytest.raises(OptimError, match=f"^{field}: '.*' is not PATTERN=FACTOR") as caught:
        OptimizerConfig(**{field: ("*=1", word)})
    assert repr(word) in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.format_message({field: "--flag"}).startswith("--flag: ")


UNKNOWN: dict[str, dict[str, object]] = {
    "lr_mult: no parameter matches 'embeding.*'; .* such as 'embedding": {
        "lr_mult": ("*=1", "embeding.*=2")
    },
    "apply_wd_to_qk_layernorm: no parameter matches .*q_norm": {"apply_wd_to_qk_layernorm": True},
}


@pytest.mark.parametrize("message", UNKNOWN)
def test_a_pattern_that_matches_no_parameter_is_refused(message: str) -> None:
    config = sgd(**UNKNOWN[message])
    names = [name for name in TABLE if "norm" not in name]
    with pytest.raises(OptimError, match=f"^{message}"):
        config.check_names(names)
    parameters = {name: nn.Parameter(torch.ones(TABLE[name].shape)) for name in names}
    with pytest.raises(OptimError, match=f"^{message}") as caught:
        Optimizer(TrainableParameters(parameters, TABLE, Mesh.single()), config)
    assert "\n" not in str(caught.value)


def staged(mesh: Mesh, pattern: str) -> str:
    """Builds the optimizer of a stage; returns its error, or how it multiplies the rate."""
    name = f"layers.{mesh.axis('pp').index}.mlp.up.weight"
    parameters = {name: nn.Parameter(torch.ones(4, 3))}
    trainable = TrainableParameters(parameters, TABLE, mesh)
    try:
        optimizer = Optimizer(trainable, OptimizerConfig(lr_mult=(f"{pattern}=0.5",)))
    except OptimError as error:
        return str(error)
    return str([group.lr_mult for group in optimizer.groups])


def test_a_pattern_may_match_on_one_stage_but_not_on_none(
    worker_pool: WorkerPool,
) -> None:
    layout = ParallelLayout(pp=2, dp=1)
    assert worker_pool.run_mesh(layout, staged, "layers.1.*") == ["[1.0]", "[0.5]"]
    refused = worker_pool.run_mesh(layout, staged, "layers.2.*")
    assert all("no parameter matches 'layers.2.*'" in message for message in refused)


def test_a_pattern_with_braces_is_shown_as_it_was_given() -> None:
    config = OptimizerConfig(lr_mult=("*=1", "{x}*=2"))
    with pytest.raises(OptimError, match=r"no parameter matches '\{x\}\*'; give patterns"):
        config.check_names(["weight"])
    with pytest.raises(OptimError, match=r"give patterns of global names, or leave it out$"):
        config.check_names([])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight_decay_mult": ("nothing=1",)}, "weight_decay_mult: .* 'nothing'; give patterns"),
        ({"embedding_weight_decay": False}, r"embedding_weight_decay: .* '\*embedding\*'; give"),
    ],
)
def test_options_of_the_weight_decay_must_match_a_parameter(
    settings: dict[str, object], message: str
) -> None:
    config = OptimizerConfig(**settings)  # type: ignore[arg-type]
    config.check_names([*TABLE, "nothing"])
    with pytest.raises(OptimError, match=f"^{message}"):
        config.check_names(["output.weight"])
