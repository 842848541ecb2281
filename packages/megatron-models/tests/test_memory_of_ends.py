"""Bytes of the ends of a model, of further depths, and of converted weights, by hand."""

import pytest
from megatron_models import LayerPass, SavedBytes, layer_activations, training_memory
from megatron_models.components.heads.spec import SequenceHeadSpec
from megatron_models.components.masked_lm.spec import MaskedLMSpec
from megatron_models.low_precision.config import LowPrecisionConfig
from megatron_models.memory import TrainingMemory
from megatron_parallel import ParallelLayout, RecomputeConfig

S, B, H, V = 8, 3, 24, 128
T = S * B
SEPARATE = {"vocab_cross_entropy": "separate"}
UNIFORM = RecomputeConfig(granularity="full", method="uniform", num_layers=1)


def ends(config, precision="float32", **options):
    """Returns what the whole model saves beyond its layers and its token ids."""
    whole = training_memory(config, S, B, precision, **options).activations
    return whole - training_memory(config, S, B, precision, layers=2, **options).activations


def norm(size, rms=False):
    """Returns the bytes of input and statistics of a norm of all tokens."""
    return T * (H * size + 4 * (1 if rms else 2))


@pytest.mark.parametrize(
    ("precision", "changes", "options", "of_token"),
    [
        ("float32", {}, {}, 8 + 1 + 4 + V * 4),  # label, flag, log-sum-exp, logits
        ("bfloat16", {}, {}, 8 + 1 + 4 + V * 2),
        ("float32", {}, {"backends": SEPARATE}, 8 + 2 + V * 4),  # two flags, probabilities
        ("bfloat16", {}, {"backends": SEPARATE}, 8 + 2 + V * 4),
        ("bfloat16", {"final_logit_softcapping": 3.0}, {}, 8 + 1 + 4 + 2 * V * 4),
        ("float32", {"final_logit_softcapping": 3.0}, {"backends": SEPARATE}, 8 + 2 + 2 * V * 4),
        ("bfloat16", {"final_logit_softcapping": 0.5}, {}, 8 + 1 + 4 + 2 * V * 4),
        ("float32", {}, {"loss_saves": "input"}, 8),
    ],
)
def test_the_end_saves_stream_norm_and_logits(small, precision, changes, options, of_token):
    size = 4 if precision == "float32" else 2
    found = ends(small(**changes), precision, **options)
    assert found == T * H * size + norm(size) + T * of_token


def test_gradients_of_the_output_matrix_replace_logits(small):
    assert ends(small(), loss_saves="gradients") == T * H * 4 + norm(4) + T * 8 + V * H * 4


def test_a_tensor_parallel_rank_has_its_part_of_the_logits(small):
    layout = ParallelLayout(tp=2, dp=1)
    whole, cut = (ends(small(), layout=layout, sequence_parallel=cut) for cut in (False, True))
    assert whole == T * H * 4 + norm(4) + T * (8 + 5 + V // 2 * 4)
    assert cut == (T * H * 4 + norm(4)) // 2 + T * (8 + 5 + V // 2 * 4)


def test_micro_batches_in_flight_and_parts_of_sequences_are_counted(small):
    one = training_memory(small(), S, B).activations
    assert training_memory(small(), S, B, in_flight=3).activations == 3 * one
    cp = ParallelLayout(cp=2, dp=1)
    assert training_memory(small(), 15, B, layout=cp).activations == one


def test_a_depth_saves_its_layer_and_another_end(small):
    plain, deep = small(), small(mtp_num_layers=1)
    found = [training_memory(each, S, B).activations for each in (plain, deep)]
    saved_bytes = SavedBytes.of_backends(4, {})
    layer = sum(layer_activations(plain, LayerPass(S, B, saved_bytes)).values())
    own = 8 * T + 3 * norm(4) + 2 * T * H * 4  # tokens, norms, both inputs of the projection
    end = T * H * 4 + T * (8 + 5 + V * 4)  # without a norm, which is counted before
    assert found[1] - found[0] == layer + own + end
    again = [training_memory(each, S, B, recompute=UNIFORM).activations for each in (plain, deep)]
    assert again[1] - again[0] == 8 * T + 2 * T * H * 4 + end
    halves = RecomputeConfig(
        granularity="full", method="uniform", num_layers=1, distribute_saved_activations=True
    )
    options = {"recompute": halves, "layout": ParallelLayout(tp=2, dp=1)}
    cut = [training_memory(each, S, B, **options).activations for each in (plain, deep)]
    logits = T * H * 4 + T * (8 + 5 + V // 2 * 4)
    assert cut[1] - cut[0] == 8 * T + 2 * T * H * 4 // 2 + logits


def test_a_head_of_sequences_replaces_the_logits(small):
    reward = small(task_head="reward")
    assert ends(reward) == norm(4) + T * 4 + B * H * 4  # weights of tokens, and one vector


@pytest.mark.parametrize(
    ("fields", "vectors"),
    [
        ({}, 0),
        ({"outputs": 3}, 1),
        ({"has_pooler": True}, 2),  # for the pooler and for tanh
        ({"has_pooler": True, "outputs": 3}, 2),
        ({"normalizes": True}, 1),
        ({"outputs": 1, "has_pooler": True, "normalizes": True}, 3),
    ],
)
@pytest.mark.parametrize(("size", "wide"), [(2, 4), (4, 4), (8, 8)])
def test_a_head_saves_weights_of_tokens_and_vectors_of_sequences(fields, vectors, size, wide):
    head = SequenceHeadSpec(num_layers=1, hidden_size=H, pooling="mean", **fields)
    layer_pass = LayerPass(S, B, SavedBytes(size))
    assert head.activation_bytes(layer_pass) == T * wide + vectors * B * H * size


@pytest.mark.parametrize(("activation", "widths"), [("gelu", 2), ("relu", 1), ("swiglu", 2)])
def test_the_head_of_masked_models_saves_activation_norm_and_result(activation, widths):
    """The gate of a gated unit is the activation of the head: SiLU saves its input."""
    sizes = {"num_layers": 1, "hidden_size": H, "vocab_size": 61, "max_position_embeddings": 16}
    head = MaskedLMSpec(**sizes, activation=activation)
    found = head.activation_bytes(LayerPass(S, B, SavedBytes(4)))
    assert found == widths * T * H * 4 + norm(4)


def test_converted_weights_are_those_of_the_linear_layers(small):
    """Both matrices of each weight in one byte an element, and a scale."""
    config = small(num_layers=4)
    layer = 24 * 3 * 24 + 24 * 24 + 2 * 24 * 40
    few = {"fp8_format": "e4m3", "fp8_recipe": "tensorwise"}

    def converted(options=(), **settings):
        given = LowPrecisionConfig(**few, **settings)
        found = training_memory(config, S, B, "bfloat16", low_precision=given, **dict(options))
        assert found.total == sum(vars(found).values())
        return found.converted_weights

    assert converted() == 4 * 2 * layer
    assert converted(first_last_layers_bf16=True) == 2 * 2 * layer
    assert converted({"layers": 1}) == 2 * layer
    assert converted({"layers": 2}, first_last_layers_bf16=True) == 2 * layer
    assert converted({"layout": ParallelLayout(tp=2, dp=1)}) == 4 * layer
    assert training_memory(config, S, B, "bfloat16").converted_weights == 0


def test_outermost_layers_save_their_inputs_as_they_are(small):
    config = small(num_layers=3)
    few = {"fp8_format": "e4m3", "fp8_recipe": "tensorwise"}
    every, inner, none = (
        training_memory(config, S, B, "bfloat16", low_precision=given).activations
        for given in (
            LowPrecisionConfig(**few),
            LowPrecisionConfig(**few, first_last_layers_bf16=True),
            LowPrecisionConfig(),
        )
    )
    assert every < inner < none and 3 * (inner - every) == 2 * (none - every)


def test_the_total_is_a_sum():
    assert TrainingMemory(1, 20, 300, 4000, 50000).total == 54321
