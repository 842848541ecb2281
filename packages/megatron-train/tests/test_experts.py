"""Layouts that experts do not support are refused in one line, before ranks communicate."""

import pytest
from megatron_models import GPTConfig
from megatron_parallel import ParallelLayout
from megatron_train.config.checkpoint import CheckpointConfig
from megatron_train.config.model_checks import check_initial_weights, check_model_layout
from megatron_train.config.sections import TrainingConfig
from megatron_train.errors import TrainError

TRAINING = TrainingConfig(micro_batch_size=1, train_iters=1)


def model(**changes):
    values = {"num_experts": 6, "ffn_hidden_size": 32, "moe_ffn_hidden_size": 20}
    sizes = {"num_layers": 1, "hidden_size": 24, "num_attention_heads": 4}
    return GPTConfig(**sizes, vocab_size=10, max_position_embeddings=8, **(values | changes))


@pytest.mark.parametrize(
    ("changes", "degrees", "message"),
    [
        ({}, {"ep": 4}, "--expert-model-parallel-size 4 cannot cut --num-experts 6 into 4 equal"),
        (
            {"moe_ffn_hidden_size": 18},
            {"tp": 4},
            "--tensor-model-parallel-size 4 cannot cut the experts' --moe-ffn-hidden-size 18",
        ),
        (
            {"moe_ffn_hidden_size": 15},
            {"etp": 5},
            "--expert-tensor-parallel-size 5 cannot cut the experts' --hidden-size 24 into 5",
        ),
        (
            {"moe_shared_expert_intermediate_size": 9},
            {"tp": 2, "etp": 1},
            "cannot cut --moe-shared-expert-intermediate-size 9 into 2 equal parts",
        ),
    ],
)
def test_experts_that_cannot_be_sharded_are_refused_with_their_sizes(changes, degrees, message):
    with pytest.raises(TrainError) as caught:
        check_model_layout(model(**changes), ParallelLayout(**degrees), TRAINING)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_experts_without_biases_do_not_split_the_hidden_size():
    changes = {"moe_ffn_hidden_size": 15, "add_bias_linear": False}
    check_model_layout(model(**changes), ParallelLayout(etp=5, ep=3), TRAINING)


def test_a_router_without_gradient_is_refused_unless_weights_are_loaded():
    one = model(moe_router_topk=1)
    with pytest.raises(TrainError, match=r"--moe-router-topk 1 .* add --moe-router-pre-softmax"):
        check_initial_weights(one, CheckpointConfig(load="run"))
    check_initial_weights(model(moe_router_topk=1, moe_router_pre_softmax=True), CheckpointConfig())
    check_initial_weights(model(num_experts=0, moe_ffn_hidden_size=0), CheckpointConfig())
    check_initial_weights(one, CheckpointConfig(load="imported", finetune=True))
    check_initial_weights(one, CheckpointConfig(pretrained_checkpoint="imported"))
