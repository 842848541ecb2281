"""The report of `plan --count`; numbers are computed by hand."""

import json
from dataclasses import replace

import pytest
from megatron_models import TrainingMemory
from megatron_train.cli import main
from megatron_train.cli.main import build_parser
from megatron_train.config.plan import resolve_plan
from megatron_train.plan.count import Count, count, format_count

GIB = 2**30
SMALL = (
    "--num-layers 4 --hidden-size 8 --num-attention-heads 2 --ffn-hidden-size 16 --vocab-size 128 "
    "--seq-length 16 --disable-bias-linear --position-embedding-type rope --normalization RMSNorm"
)
MEMORY = TrainingMemory(
    parameters=GIB, gradients=2 * GIB, optimizer=4 * GIB, activations=GIB // 2, converted_weights=0
)


def planned(flags=""):
    words = ["plan", "gpt", "--count", *SMALL.split(), *flags.split()]
    return resolve_plan(build_parser().parse_args(words))


@pytest.fixture(scope="module")
def run():
    return planned()


@pytest.fixture(scope="module")
def counted(run):
    return count(run)


def lines(run, found):
    return [*format_count(run, found)]


def test_the_report_has_every_number_in_its_row(run, counted):
    found = replace(counted, memory=MEMORY, host_memory=GIB * 3 // 2)
    assert lines(run, found) == [
        "model of kind gpt, 4 layers",
        "parameters                 3,144",
        "  embedding                1,024   32.6%",  # 128 x 8
        "  norms                       72    2.3%",  # 9 x 8
        "  attention                1,024   32.6%",  # 4 x 4 x 8 x 8
        "  mlp                      1,024   32.6%",  # 4 x 2 x 8 x 16
        "",
        "operations of a forward and backward pass, sequences of 16 tokens",
        "  one token     21504 FLOP",
        "  one sequence  344064 FLOP, 14.3% of it query-key pairs",
        "  one step      344064 FLOP, 1 sequences",
        "",
        "memory of one rank, float32",
        "  parameters        1.00 GiB",
        "  gradients         2.00 GiB",
        "  optimizer         4.00 GiB",
        "  activations       0.50 GiB  (1 micro-batch of 1 x 16 tokens in flight)",
        "  total             7.50 GiB  (temporary buffers of operations come on top)",
        "  on the host       1.50 GiB  (main weights, gradients and state)",
    ]


def test_operations_are_six_for_each_weight_and_those_of_pairs(counted):
    """4 layers multiply queries and keys, and scores and values, of half of 16 x 16 pairs."""
    weights = 128 * 8 + 4 * (4 * 8 * 8 + 2 * 8 * 16)  # the output layer is the embedding
    pairs = 6 * 4 * 2 * 16 * 16 * 8 // 2
    assert counted.flops_per_sequence == 6 * 16 * weights + pairs
    assert counted.attention_share == pytest.approx(pairs / counted.flops_per_sequence)
    assert counted.micro_batches_in_flight == 1 and counted.host_memory == 0


@pytest.mark.parametrize(
    ("operations", "shown"),
    [
        (0, "0 FLOP"),
        (999_999, "999999 FLOP"),
        (1_000_000, "1 MFLOP"),
        (12_345_678, "12.35 MFLOP"),
        (10**9 - 1, "1000 MFLOP"),
        (10**9, "1 GFLOP"),
        (2 * 10**12, "2 TFLOP"),
        (3 * 10**15, "3 PFLOP"),
        (4 * 10**18, "4 EFLOP"),
        (5 * 10**21, "5000 EFLOP"),
    ],
)
def test_operations_have_the_largest_unit_that_they_fill(operations, shown, run, counted):
    found = replace(counted, flops_per_sequence=16 * operations, flops_per_step=operations)
    printed = lines(run, found)
    assert printed[8] == f"  one token     {shown}"
    assert printed[10] == f"  one step      {shown}, 1 sequences"


def test_a_part_of_the_parameters_is_active_with_experts():
    flags = "--num-experts 4 --moe-shared-expert-intermediate-size 8 --mtp-num-layers 1 "
    run = planned(f"{flags} --untie-embeddings-and-output-weights")
    found = count(run)
    # 4 layers, and one of multi-token prediction with a projection of two vectors and 3 norms
    assert found.parts == {
        "embedding": 128 * 8,
        "norms": 9 * 8 + 5 * 8,
        "attention": 5 * 4 * 8 * 8,
        "router": 5 * 4 * 8,
        "experts": 5 * 4 * 2 * 8 * 16,
        "shared": 5 * 2 * 8 * 8,
        "output": 128 * 8,
        "eh_proj": 16 * 8,
    }
    assert found.parameters == sum(found.parts.values()) == 9488
    assert found.active_parameters == found.parameters - 5 * 2 * 2 * 8 * 16  # 2 of 4 experts
    assert lines(run, found)[10] == "active for one token                6,928   73.0%"
    assert "active" not in "".join(lines(run, replace(found, active_parameters=9488)))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--float64", "memory of one rank, float32"),  # what float64 needs more is not counted
        ("--bf16", "memory of one rank, bfloat16"),
        ("--fp16", "memory of one rank, float16"),
        ("--world-size 2", "memory of each of 2 ranks, tp 1 x cp 1 x dp 2 x pp 1"),
        (
            "--pipeline-model-parallel-size 2 --global-batch-size 1",
            "2, order tp-cp-ep-dp-pp (first pipeline stage), float32",
        ),
    ],
)
def test_the_memory_is_that_of_a_rank_of_a_layout(flags, line):
    run = planned(flags)
    assert line in "\n".join(lines(run, count(run)))


@pytest.mark.parametrize(
    ("samples", "flight", "text"),
    [
        (1, 1, "(1 micro-batch of 1 x 16 tokens in flight)"),
        (64, 2.5, "(2.5 micro-batches of 1 x 16 tokens in flight)"),
    ],
)
def test_micro_batches_in_flight_are_at_most_those_of_the_step(samples, flight, text, counted):
    flags = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    run = planned(f"{flags} --global-batch-size {samples}")
    found = count(run)
    assert found.micro_batches_in_flight == flight
    assert text in "\n".join(lines(run, found))
    assert found.flops_per_step == samples * counted.flops_per_sequence
    one = count(planned(f"{flags} --global-batch-size 1")).memory.activations
    assert found.memory.activations == int(flight * one)


def test_a_model_of_several_trunks_has_no_formula_for_its_memory(capsys):
    words = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --vocab-size 16 --seq-length 8"
    assert main(["plan", "t5", "--count", *words.split()]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "memory: unknown: a model of kind 't5' has several trunks, not one"
    assert main(["plan", "t5", "--count", "--json", *words.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"] is None and found["micro_batches_in_flight"] == 0.0
    assert found["memory_unknown"] == "a model of kind 't5' has several trunks, not one"


def test_plain_values_have_the_total_of_the_memory():
    found = Count(1, 1, {"a": 1}, 2, 3, 0.5, MEMORY, 1.0).to_dict()
    assert found["memory"]["total"] == 15 * GIB // 2
    assert (found["memory_unknown"], found["host_memory"]) == ("", 0)


def activations(flags=""):
    return count(planned(flags)).memory.activations


def test_a_fused_loss_keeps_less_than_logits():
    """Logits of 16 x 128 in fp32; gradients of the hidden states and the weights; the input."""
    fused = "--cross-entropy-loss-fusion --cross-entropy-fusion-impl"
    logits, gradients, inputs = map(
        activations, ("", f"{fused} linear", f"{fused} linear-recompute")
    )
    assert inputs < gradients < logits
    assert gradients - inputs == 4 * 128 * 8  # the gradient of the weights
    assert activations("--bf16") < logits
