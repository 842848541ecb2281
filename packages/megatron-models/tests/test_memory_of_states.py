"""Bytes of parameters, gradients and optimizer state of one rank, as ZeRO's stages cut them.

Rajbhandari et al. 2020, section 3: with N parameters in 16 bits a rank holds 2N bytes of weights,
the gradients and 12N of AdamW's state; stage 1 divides the state by the number of data-parallel
ranks, stage 3 divides everything.
"""

import pytest
from megatron_models import parameter_count, training_memory
from megatron_models.errors import ConfigError
from megatron_parallel import DataParallelConfig, ParallelLayout
from megatron_parallel.tensor_parallel import LoRA

EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 40, "moe_layer_freq": "2"}
STAGE1 = DataParallelConfig(use_distributed_optimizer=True)
STAGE3 = DataParallelConfig(use_torch_fsdp2=True)


def states(config, precision="float32", **options):
    """Returns bytes of parameters, gradients and optimizer state, without activations."""
    found = training_memory(config, 8, 1, precision, activations=False, **options)
    assert (found.activations, found.converted_weights) == (0, 0)
    assert found.total == found.parameters + found.gradients + found.optimizer
    return found.parameters, found.gradients, found.optimizer


def of_experts(config):
    """Returns the elements of dense parameters, and of the experts: 2 matrices and biases each."""
    one = 2 * 24 * 40 + 40 + 24
    experts = 4 * one
    return parameter_count(config, padded=True) - experts, experts


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_stage_one_cuts_the_state_alone(small, dp) -> None:
    config, layout = small(), ParallelLayout(dp=dp)
    n = parameter_count(config, padded=True)
    assert states(config, layout=layout) == (4 * n, 4 * n, 8 * n)
    assert states(config, layout=layout, data_parallel=STAGE1) == (4 * n, 4 * n, 8 * n // dp)
    half = states(config, "bfloat16", layout=layout, data_parallel=STAGE1)
    assert half == (2 * n, 4 * n, 12 * n // dp)
    assert states(config, data_parallel=STAGE1)[2] == 8 * n  # one rank without a layout


def test_context_parallel_ranks_hold_shards_and_instances_hold_all(small) -> None:
    config, n = small(), parameter_count(small(), padded=True)
    for layout, ranks in (
        (ParallelLayout(dp=2, cp=2), 4),
        (ParallelLayout(dp=4, dp_outer=2), 2),
        (ParallelLayout(dp=2, cp=4, dp_outer=4), 2),
    ):
        assert states(config, layout=layout, data_parallel=STAGE1)[2] == 8 * n // ranks, layout


@pytest.mark.parametrize("dp", [2, 4])
def test_stage_three_cuts_everything(small, dp) -> None:
    config, layout = small(), ParallelLayout(dp=dp)
    part = -(-parameter_count(config, padded=True) // dp)
    found = states(config, "bfloat16", layout=layout, data_parallel=STAGE3)
    assert found[:2] == (2 * part, 2 * part)
    assert found[2] == pytest.approx(12 * part, abs=12)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 4),
        ({"accumulate_allreduce_grads_in_fp32": False}, 2),
        (
            {
                "accumulate_allreduce_grads_in_fp32": False,
                "ddp_reduce_scatter_with_fp32_accumulation": True,
            },
            4,
        ),
    ],
)
def test_main_gradients_have_the_dtype_of_their_sum(small, options, size) -> None:
    n = parameter_count(small(), padded=True)
    data_parallel = DataParallelConfig(**options)
    assert states(small(), "bfloat16", data_parallel=data_parallel)[1] == size * n
    assert states(small(), "float32", data_parallel=data_parallel)[1] == 4 * n


def test_experts_are_cut_over_the_ranks_that_have_copies_of_them(small) -> None:
    config = small(**EXPERTS)
    dense, experts = of_experts(config)
    layout = ParallelLayout(dp=4, ep=2)  # two copies of each expert
    own = dense + experts // 2
    assert states(config, layout=layout) == (4 * own, 4 * own, 8 * own)
    part = dense // 4 + experts // 2 // 2
    cut = states(config, layout=layout, data_parallel=STAGE1)
    assert cut[:2] == (4 * own, 4 * own) and cut[2] == pytest.approx(8 * part, abs=8)
    assert states(config, "bfloat16", layout=layout, data_parallel=STAGE3) == (
        pytest.approx(2 * part, abs=4),
        pytest.approx(2 * part, abs=4),
        pytest.approx(12 * part, abs=12),
    )


def test_experts_without_copies_have_main_gradients_in_stage_three(small) -> None:
    config = small(**EXPERTS)
    dense, experts = of_experts(config)
    layout = ParallelLayout(dp=4, ep=4)
    found = states(config, "bfloat16", layout=layout, data_parallel=STAGE3)
    part, held = -(-dense // 4), experts // 4
    assert found[0] == 2 * (part + held)
    assert found[1] == 2 * (part + held) + 2 * held  # float32 for those that are held whole


def test_state_of_a_rule_may_depend_on_the_parameter(small) -> None:
    config = small()
    vectors = sum(
        spec.numel for spec in config.parameters().values() if len(spec.sharding.shape) == 1
    )
    n = parameter_count(config, padded=True)

    def of_matrices(sharding):
        return 0 if len(sharding.shape) == 1 else 5

    assert states(config, state_bytes=of_matrices)[2] == 5 * (n - vectors)
    found = states(config, "bfloat16", state_bytes=of_matrices, main_bytes=2)[2]
    assert found == 2 * n + 5 * (n - vectors)
    assert states(config, state_bytes=1, main_bytes=2)[2] == n  # float32 is its own main weight


def test_an_adapter_adds_parameters_and_trains_them_alone(small) -> None:
    config, layout = small(), ParallelLayout(dp=2)
    n = parameter_count(config, padded=True)
    adapter = {"linear_fc2": LoRA(2, 4.0)}
    added = 2 * 2 * (40 + 24)  # in both layers
    found = states(config, "bfloat16", layout=layout, data_parallel=STAGE1, products=adapter)
    assert found == (2 * (n + added), 4 * added, 12 * added // 2)
    cut = states(config, "bfloat16", layout=layout, data_parallel=STAGE3, products=adapter)
    assert cut == (2 * -(-(n + added) // 2), 2 * added // 2, 12 * added // 2)


def test_a_stage_has_its_layers_and_the_embedding(small) -> None:
    config = small(num_layers=4)
    of_layer = sum(
        spec.numel for name, spec in config.parameters().items() if name.startswith("layers.0.")
    )
    embeddings = 128 * 24 + 16 * 24  # 61 tokens, padded; positions
    assert states(config, layers=3)[0] == 4 * (3 * of_layer + embeddings)


def test_a_sequence_of_all_positions_is_the_longest(small) -> None:
    assert training_memory(small(), 16, 1).activations
    with pytest.raises(ConfigError, match=r"17 .* 16"):
        training_memory(small(), 17, 1)
