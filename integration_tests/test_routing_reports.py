"""What layers with experts count for reports: equal to a plain count, and the same on any ranks."""

import math
import re
from dataclasses import replace

import pytest
import torch
from megatron_models import GPTConfig, Placement, gpt_chunks
from megatron_models.components.moe.router import Router
from megatron_parallel import Mesh, ParallelLayout, RecomputeConfig
from megatron_parallel.testing import WorkerPool
from megatron_train import read_records
from megatron_train.engine import StepEngine
from megatron_train.tasks.gpt import GPTTask
from megatron_train.tasks.task import MicroBatch, layer_values, worst_layers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

MODEL = GPTConfig(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=2,
    ffn_hidden_size=24,
    vocab_size=50,
    max_position_embeddings=16,
    num_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=12,
    moe_layer_freq="[0,1,1,1]",
    moe_expert_capacity_factor=1.25,
    moe_aux_loss_coeff=0.0,
    init_method_std=0.4,
)
LAYERS = (1, 2, 3)
SIGMOID = replace(MODEL, moe_router_score_function="sigmoid", moe_aux_loss_coeff=0.1)
RECOMPUTED = RecomputeConfig("full", "uniform", num_layers=1)


def batch(number: int) -> dict[str, torch.Tensor]:
    """Returns a micro-batch of three samples; the first one ends in `number` padding tokens."""
    generator = torch.Generator().manual_seed(number)
    text = torch.randint(MODEL.vocab_size, (3, 9), generator=generator)
    documents = torch.zeros(3, 8, dtype=torch.int32)
    documents[0, 8 - number :] = -1
    return {
        "tokens": text[:, :-1],
        "labels": text[:, 1:],
        "loss_mask": (documents >= 0).float(),
        "document_ids": documents,
        "positions": torch.arange(8, dtype=torch.int32).expand(3, 8).contiguous(),
    }


def step(mesh: Mesh, config: GPTConfig, recompute: RecomputeConfig, sequence_parallel: bool):
    """Returns counts and reports of a step of four micro-batches, and the routings by layer."""
    placement = Placement(
        mesh, dtype=torch.float64, recompute=recompute, sequence_parallel=sequence_parallel
    )
    stages = gpt_chunks(config, placement)
    task = GPTTask(stages, None, reset_attention_mask=True, per_layer_logging=True)
    engine = StepEngine(task, mesh)
    seen: dict[int, list] = {layer: [] for layer in LAYERS}
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, Router):
                module.register_forward_hook(
                    lambda router, _, found: seen[router.layer].append(found)
                )
    data = mesh.axis("dp")
    numbers = torch.arange(1, 5).chunk(data.size)[data.index].tolist()
    batches = [MicroBatch.from_fields(batch(n), token_field="tokens") for n in numbers]
    engine.run(batches, engine.denominators(batches), 1)
    counts = {name: values.tolist() for name, values in engine.counts.items()}
    return counts, layer_values(task, counts), worst_layers(task, counts), seen


def plain_count(config: GPTConfig, routings) -> tuple[float, float, float]:
    """Returns load, entropy and dropped share of one layer, counted token by token."""
    load, total, selections, kept = [0] * 4, [0.0] * 4, 0, 0
    capacity = math.ceil(24 * 2 / 4 * 1.25)
    for routing in routings:
        own = [0] * 4
        for experts, logits in zip(routing.experts.tolist(), routing.logits.tolist(), strict=True):
            if experts[0] < 0:
                continue
            if config.moe_router_score_function == "softmax":
                scores = [math.exp(x - max(logits)) for x in logits]
            else:
                scores = [1 / (1 + math.exp(-x)) for x in logits]
            for expert, score in enumerate(scores):
                total[expert] += score / sum(scores)
            for expert in experts:
                own[expert] += 1
        load = [one + other for one, other in zip(load, own, strict=True)]
        selections += sum(own)
        kept += sum(min(count, capacity) for count in own)
    shares = [value / sum(total) for value in total]
    entropy = -sum(share * math.log2(share) for share in shares) / 2
    return max(load) / (selections / 4), entropy, 1 - kept / selections


@pytest.mark.parametrize("config", [MODEL, SIGMOID], ids=["softmax", "sigmoid"])
def test_reports_equal_a_plain_count(config) -> None:
    _, values, worst, seen = step(Mesh.single(), config, RecomputeConfig(), False)
    expected = {layer: plain_count(config, seen[layer]) for layer in LAYERS}
    dropped = [found[2] for found in expected.values()]
    assert max(dropped) > 0.01
    names = ("expert_load", "router_entropy", "dropped_share")
    assert values == pytest.approx(
        {f"moe/{n}_layer_{i}": expected[i][k] for k, n in enumerate(names) for i in LAYERS},
        rel=1e-9,
        abs=1e-12,
    )
    for title, column, pick in (
        ("expert load", 0, max),
        ("router entropy", 1, min),
        ("dropped share", 2, max),
    ):
        layer = pick(LAYERS, key=lambda i: expected[i][column])
        assert worst[title] == (pytest.approx(expected[layer][column], rel=1e-9), layer)


@pytest.mark.parametrize(
    ("layout", "recompute", "sequence_parallel"),
    [
        pytest.param({"tp": 2, "ep": 2, "etp": 1, "dp": 1}, RECOMPUTED, True, id="tp2-sp-ep2"),
        pytest.param({"cp": 2, "dp": 1}, RecomputeConfig(), False, id="cp2"),
        pytest.param({"pp": 2, "dp": 1}, RECOMPUTED, False, id="pp2"),
        pytest.param({"dp": 2, "ep": 2}, RecomputeConfig(), False, id="dp2-ep2"),
    ],
)
def test_reports_on_several_ranks_equal_those_of_one(
    worker_pool: WorkerPool, layout, recompute, sequence_parallel
) -> None:
    counts, _, worst, _ = step(Mesh.single(), SIGMOID, RecomputeConfig(), False)
    ranks = worker_pool.run_mesh(
        ParallelLayout(**layout), step, SIGMOID, recompute, sequence_parallel
    )
    for values, _, found, _ in ranks:
        assert values.keys() == counts.keys()
        for name, own in values.items():
            assert own == pytest.approx(counts[name], rel=1e-12)
        assert found == {n: (pytest.approx(v, rel=1e-12), i) for n, (v, i) in worst.items()}


SIZES = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16"
RUN = (
    f"pretrain gpt {SIZES} --mock-data --tokenizer-type NullTokenizer --vocab-size 31 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 0.01 --log-interval 2 --train-iters 4 "
    "--eval-iters 0 --no-progress --num-experts 4 --moe-layer-freq [0,1] "
    "--moe-expert-capacity-factor 1.0"
)
PART = re.compile(r"(expert load|router entropy|dropped share): (\S+) \(layer (\d)\)")


@pytest.fixture
def start(train_in, tmp_path):
    """Returns a function that runs a command in this process and returns what it prints."""
    return train_in(tmp_path)


def reported(printed: str) -> list[tuple[str, str, str]]:
    """Returns the reports of the last log line."""
    lines = [line for line in printed.splitlines() if " iteration " in line]
    return PART.findall(lines[-1])


def test_a_run_reports_layers_on_line_in_files_and_on_the_page(start, tmp_path) -> None:
    printed = start(f"{RUN} --moe-per-layer-logging --save whole --tensorboard-dir board")
    parts = reported(printed)
    assert [(name, layer) for name, _, layer in parts] == [
        ("expert load", "1"),
        ("router entropy", "1"),
        ("dropped share", "1"),
    ]
    records = read_records(tmp_path / "whole/metrics.jsonl").train
    keys = [f"moe/{n}_layer_1" for n in ("expert_load", "router_entropy", "dropped_share")]
    for record in records:
        assert [key for key in record if key.startswith("moe/")] == keys
        assert 1 <= record[keys[0]] <= 4 and 0 < record[keys[1]] <= 1 and 0 <= record[keys[2]] < 1
    mean = sum(record[keys[2]] for record in records[2:]) / 2  # steps with equally many selections
    assert float(parts[2][1]) == pytest.approx(mean, rel=1e-3)
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    for key in keys:
        held = {event.step: event.value for event in board.Scalars(key)}
        assert held == {r["iteration"]: pytest.approx(r[key]) for r in records[1::2]}
    start("report whole")
    page = (tmp_path / "whole/report.html").read_text()
    assert page.count("<figcaption>moe/expert load<") == 1
    assert "moe/expert_load_layer_1 of step" not in page  # no tile, as a loss has


def test_a_run_that_resumes_within_an_interval_reports_the_same(start) -> None:
    whole = reported(start(f"{RUN} --moe-per-layer-logging"))
    start(f"{RUN} --moe-per-layer-logging --save part --exit-interval 3")
    assert reported(start(f"{RUN} --moe-per-layer-logging --load part")) == whole
    assert reported(start(RUN)) == []


def test_a_model_without_experts_has_nothing_to_report(start) -> None:
    dense = RUN.partition(" --num-experts")[0]
    error = start(f"{dense} --moe-per-layer-logging", 1)
    assert "--moe-per-layer-logging has no effect without experts" in error
