"""`megatron-train plan --count`, compared with published sizes and hand-computed cases."""

import json

import pytest
from megatron_train.cli import main

LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
MIXTRAL = LLAMA3_8B | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
SMALL = (
    "--num-layers 4 --hidden-size 8 --num-attention-heads 2 --ffn-hidden-size 16 --vocab-size 128 "
    "--seq-length 16 --disable-bias-linear --position-embedding-type rope --normalization RMSNorm"
)


def planned(capsys, *words):
    assert main(["plan", "gpt", "--count", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def hf(tmp_path):
    def write(content):
        (tmp_path / "config.json").write_text(json.dumps(content))
        return ("--hf-config", str(tmp_path))

    return write


def test_a_published_dense_model_has_its_published_size(capsys, hf):
    found = planned(capsys, *hf(LLAMA3_8B), "--seq-length", "8192")
    assert found["parameters"] == found["active_parameters"] == 8_030_261_248
    assert sum(found["parts"].values()) == found["parameters"]
    # Megatron-LM's formula.
    assert found["flops_per_sequence"] == pytest.approx(4.216455e14, rel=1e-6)


def test_a_published_mixture_has_its_published_size(capsys, hf):
    found = planned(capsys, *hf(MIXTRAL), "--seq-length", "4096", "--global-batch-size", "3")
    assert found["parameters"] == 46_702_792_704
    assert found["active_parameters"] == 12_879_925_248
    assert found["parts"]["experts"] == 32 * 8 * 3 * 4096 * 14336
    assert found["parts"]["router"] == 32 * 8 * 4096
    assert found["flops_per_sequence"] == pytest.approx(3.264776e14, rel=1e-4)
    assert found["flops_per_step"] == 3 * found["flops_per_sequence"]


def test_the_vocabulary_may_be_that_of_a_tokenizer_without_a_corpus(capsys):
    words = SMALL.replace("--vocab-size 128", "--tokenizer-type ByteTokenizer").split()
    assert planned(capsys, *words)["parts"]["embedding"] == 257 * 8


@pytest.mark.parametrize("corpus", ["--data-path a", "--train-data-path a", "--mock-data"])
def test_the_corpus_of_a_run_may_be_given_to_its_plan(capsys, corpus):
    assert planned(capsys, *SMALL.split(), *corpus.split()) == planned(capsys, *SMALL.split())


def test_a_plan_does_not_depend_on_the_length_of_the_run(capsys):
    plain = planned(capsys, *SMALL.split())
    for length in ("--train-iters 9", "--train-samples 9"):
        assert planned(capsys, *SMALL.split(), *length.split()) == plain
    ramp = "--train-samples 9 --rampup-batch-size 2 2 8 --global-batch-size 4"
    found = planned(capsys, *SMALL.split(), *ramp.split())
    assert found["flops_per_step"] == 4 * plain["flops_per_sequence"]


def test_memory_of_a_rank_is_that_of_its_shards(capsys):
    whole = planned(capsys, *SMALL.split())
    # Embedding, norms, and in each layer attention and feed-forward layer.
    parameters = 128 * 8 + 9 * 8 + 4 * (4 * 8 * 8 + 2 * 8 * 16)
    assert whole["parameters"] == parameters
    states = whole["memory"]["parameters"], whole["memory"]["optimizer"]
    assert states == (4 * parameters, 8 * parameters)
    pair = ("--pipeline-model-parallel-size", "2", "--global-batch-size", "8")
    staged = planned(capsys, *SMALL.split(), *pair, "--world-size", "2")
    layer = 2 * 8 + 4 * 8 * 8 + 2 * 8 * 16
    assert staged["memory"]["parameters"] == 4 * (128 * 8 + 2 * layer)
    assert staged["micro_batches_in_flight"] == 2  # 1F1B, first of two stages
    assert staged["parameters"] == parameters
    virtual = (*pair, "--num-virtual-stages-per-pipeline-rank", "2")
    interleaved = planned(capsys, *SMALL.split(), *virtual)
    assert interleaved["micro_batches_in_flight"] == 2.5
    assert interleaved["memory"]["parameters"] == 4 * (128 * 8 + 2 * layer)
    assert sum(whole["memory"].values()) == 2 * whole["memory"]["total"]


def test_averages_of_weights_take_4_bytes_each(capsys):
    plain = planned(capsys, *SMALL.split())
    averaged = planned(capsys, *SMALL.split(), "--ema-decay", "0.9")
    more = 4 * plain["parameters"]
    assert averaged["memory"]["optimizer"] == plain["memory"]["optimizer"] + more
    assert averaged["memory"]["total"] == plain["memory"]["total"] + more


def test_adapters_alone_have_gradients_and_optimizer_state(capsys):
    """Two matrices of rank 2 for each of 4 weights of a layer: its inputs and its outputs."""
    plain = planned(capsys, *SMALL.split())
    lora = planned(capsys, *SMALL.split(), "--linear-product", "lora", "--lora-rank", "2")
    adapters = 4 * 2 * ((8 + 24) + (8 + 8) + (8 + 16) + (16 + 8))
    assert lora["memory"]["parameters"] == plain["memory"]["parameters"] + 4 * adapters
    assert lora["memory"]["gradients"] == 4 * adapters
    assert lora["memory"]["optimizer"] == 8 * adapters


@pytest.mark.parametrize(
    ("precision", "whole"), [("", 8), ("--bf16", 12), ("--fp16", 12)], ids=["fp32", "bf16", "fp16"]
)
def test_offloaded_state_is_counted_on_the_host(capsys, precision, whole):
    words = [*SMALL.split(), *precision.split()]
    count = planned(capsys, *words)["parameters"]
    offload = [*words, "--optimizer-cpu-offload"]
    every = planned(capsys, *offload)
    # The host has main weights, gradients and two means in fp32.
    assert (every["memory"]["optimizer"], every["host_memory"]) == (0, 16 * count)
    part = [*offload, "--optimizer-offload-fraction", "0.25"]
    some = planned(capsys, *part, "--use-distributed-optimizer", "--world-size", "2")
    assert some["memory"]["optimizer"] == pytest.approx(0.75 * whole * count / 2, abs=8)
    assert some["host_memory"] == pytest.approx(0.25 * 16 * count / 2, abs=8)
    assert main(["plan", "gpt", "--count", *part]) == 0
    assert "  on the host       0.00 GiB  (main weights, gradients" in capsys.readouterr().out


def test_the_report_names_every_number(capsys, hf):
    words = (*hf(MIXTRAL), *["--seq-length", "4096", "--bf16", "--expert-model-parallel-size", "8"])
    assert main(["plan", "gpt", "--count", *words]) == 0
    out = capsys.readouterr().out
    for text in (
        "parameters                 46,702,792,704",
        "  experts                  45,097,156,608   96.6%",
        "active for one token       12,879,925,248   27.6%",
        "  one sequence  326.5 TFLOP, 4.0% of it query-key pairs",
        "memory of each of 8 ranks, ",
        "1 micro-batch of 1 x 4,096 tokens in flight",
    ):
        assert text in out, text


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("--seq-length 8", 2, "say what to compute: --count"),
        ("--count", 2, "missing: --num-layers, --hidden-size, --vocab-size, --num-attention-heads"),
        (f"--count {SMALL} --world-size x", 2, "--world-size needs a positive integer, got 'x'"),
        (
            f"--count {SMALL} --tensor-model-parallel-size 3",
            1,
            "--tensor-model-parallel-size 3 cannot cut --num-attention-heads 2 into 3 equal parts",
        ),
        (f"--count {SMALL} --pipeline-model-parallel-size 2 --world-size 3", 1, "multiple of 2"),
        (f"--count {SMALL} --num-experts 3 --expert-model-parallel-size 2", 1, "--num-experts 3"),
        (
            f"--count {SMALL} --optimizer-offload-fraction 0.5",
            1,
            "--optimizer-offload-fraction 0.5 has no effect without --optimizer-cpu-offload",
        ),
        ("--count --seq-length 8 --hf-config nowhere", 1, "nowhere: No such file or directory"),
    ],
)
def test_errors_are_one_line(words, status, message, capsys):
    assert main(["plan", "gpt", *words.split()]) == status
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize(
    "method", [{"quant_method": "mxfp4"}, {"quant_method": "fp8", "weight_block_size": [128, 128]}]
)
def test_a_quantization_that_is_read_does_not_change_the_model(method, capsys, hf):
    plain = planned(capsys, *hf(LLAMA3_8B), "--seq-length", "16")
    quantized = {**LLAMA3_8B, "quantization_config": method}
    assert planned(capsys, *hf(quantized), "--seq-length", "16") == plain


def test_an_unknown_quantization_is_refused(capsys, hf):
    words = hf({**LLAMA3_8B, "quantization_config": {"quant_method": "awq"}})
    assert main(["plan", "gpt", "--count", "--seq-length", "16", *words]) == 1
    error = capsys.readouterr().err
    assert "quantization_config" in error and "awq" in error and error.count("\n") == 1


def test_a_config_of_another_kind_of_model_is_refused(capsys, hf):
    words = ["plan", "mamba", "--count", "--seq-length", "16", *hf(LLAMA3_8B)]
    assert main(words) == 1
    error = capsys.readouterr().err
    assert "is a model of kind gpt, not mamba; give gpt instead of mamba" in error


@pytest.mark.parametrize("content", ["[", "[]", '{"architectures": ["Strange"]}'])
def test_a_strange_config_is_refused_in_one_line(content, capsys, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(content)
    assert main(["plan", "gpt", "--count", "--seq-length", "8", "--hf-config", str(file)]) == 1
    captured = capsys.readouterr()
    assert str(file) in captured.err and captured.err.count("\n") == 1
