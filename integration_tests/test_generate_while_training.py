"""The stages of a running trainer generate in every layout without any effect on training."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from megatron_infer import SamplingParams, generate_tokens
from megatron_models import GPTConfig
from megatron_optim import OptimizerConfig
from megatron_parallel import DataParallelConfig, Mesh, ParallelLayout
from megatron_train import (
    DataConfig,
    EvaluationConfig,
    PlacementConfig,
    RunConfig,
    TrainingConfig,
)
from megatron_train.assembly import build_trainer
from megatron_train.broadcast_batches import open_batches
from megatron_train.tasks.gpt_kind import TASK

PROMPTS = [[5], [17, 3, 44, 9, 9, 20, 1], [2, 60], [11, 12, 13]]
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)
EXPERTS = {  # with expert biases, which follow the tokens of training
    "num_experts": 4,
    "moe_ffn_hidden_size": 16,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.1,
}


@dataclass(frozen=True)
class Case:
    """The layout and options of a run."""

    layout: ParallelLayout
    model: dict[str, Any] = field(default_factory=dict)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)

    @property
    def run(self) -> RunConfig:
        """Returns the configuration of a run with this layout."""
        return RunConfig(
            model=GPTConfig(
                num_layers=4,
                hidden_size=32,
                num_attention_heads=4,
                num_query_groups=2,
                vocab_size=61,
                make_vocab_size_divisible_by=16,
                max_position_embeddings=24,
                position_embedding_type="rope",
                init_method_std=0.5,
                **self.model,
            ),
            data=DataConfig(seq_length=16, mock_data=True),
            training=TrainingConfig(
                train_iters=3,
                micro_batch_size=2,
                global_batch_size=8,
                float64=True,
                hidden_dropout=0.1,
                attention_dropout=0.0,
            ),
            optimizer=OptimizerConfig(lr=3e-3),
            evaluation=EvaluationConfig(eval_iters=0),
            layout=self.layout,
            placement=self.placement,
            data_parallel=self.data_parallel,
        )


SHARDED = DataParallelConfig(
    use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
)
SEQUENCE = PlacementConfig(sequence_parallel=True)
CASES = {
    "tp2-sequence": Case(ParallelLayout(tp=2, dp=1), placement=SEQUENCE),
    "tp2-sequence-overlap": Case(
        ParallelLayout(tp=2, dp=1), placement=replace(SEQUENCE, tp_comm_overlap=True)
    ),
    "cp2": Case(ParallelLayout(cp=2, dp=1)),
    "pp2-vpp2": Case(ParallelLayout(pp=2, vpp=2, dp=1)),
    "dp2-sharded": Case(ParallelLayout(dp=2), data_parallel=SHARDED),
    "dp2-fsdp": Case(ParallelLayout(dp=2), data_parallel=DataParallelConfig(use_torch_fsdp2=True)),
    "experts-tp2-sequence-ep2": Case(
        ParallelLayout(tp=2, ep=2, etp=1, dp=1), model=EXPERTS, placement=SEQUENCE
    ),
    "experts-cp2-ep2": Case(ParallelLayout(cp=2, ep=2, dp=1), model=EXPERTS),
}


def train(mesh: Mesh, config: RunConfig, generates: bool) -> tuple[list, list, list]:
    """Returns tokens between steps, losses and norms of steps, and last weights and state."""
    batches = open_batches(config, lambda: TASK.open_data(config, None), mesh)
    trainer = build_trainer(config, TASK, batches, mesh, torch.float64)
    steps, tokens, reports = trainer.micro_batches(0), [], []
    for _ in range(config.training.train_iters):
        report = trainer.step(steps)
        reports.append((report.sums, report.grad_norm))
        if generates:
            found = generate_tokens(trainer.task.stages, PROMPTS, GREEDY)
            tokens.append([one.tokens for one in found])
    views = trainer.engine.stages.views()
    held = [view.tensor for name in sorted(views) for view in views[name]]
    held += [state for stage in trainer.task.stages for state in stage.buffers()]
    return tokens, reports, held


@pytest.fixture(scope="module")
def on_one_rank() -> dict[str, list]:
    """Returns the results of one rank for a dense model and for one with experts."""
    found = {}
    for name, model in (("dense", {}), ("experts", EXPERTS)):
        alone = Case(ParallelLayout(), model=model).run
        found[name], *_ = train(Mesh.single(), alone, True)
        assert len({token for step in found[name] for one in step for token in one}) > 8
        assert found[name][0] != found[name][-1]  # the weights have changed
    return found


SLOW = ("tp2-sequence-overlap", "experts-cp2-ep2")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES]
)
def test_a_running_trainer_generates_and_trains_as_one_rank(worker_pool, on_one_rank, name):
    config = CASES[name].run
    expected = on_one_rank["experts" if CASES[name].model else "dense"]
    generating = worker_pool.run_mesh(config.layout, train, config, True)
    silent = worker_pool.run_mesh(config.layout, train, config, False)
    for (tokens, reports, weights), (_, alone, unmoved) in zip(generating, silent, strict=True):
        assert tokens == expected
        assert reports == alone
        assert all(torch.equal(a, b) for a, b in zip(weights, unmoved, strict=True))
