"""A small training job on one device, assembled as in `megatron-train`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from megatron_models import GPTConfig, Placement, gpt_chunks
from megatron_optim import (
    LossScaleConfig,
    OffloadConfig,
    Optimizer,
    OptimizerConfig,
    StateFormatConfig,
)
from megatron_parallel import DataParallelConfig, Mesh, RecomputeConfig
from megatron_train.compiling import CompileScope
from megatron_train.cuda_graphs import GraphBackend
from megatron_train.engine import StepEngine
from megatron_train.tasks.gpt import GPTTask
from megatron_train.tasks.task import MicroBatch
from torch import Tensor

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 64,
    "vocab_size": 97,
    "max_position_embeddings": 16,
}
LEARNING_RATE = 1e-3


@dataclass
class Job:
    """Model, engine and optimizer on one device."""

    device: torch.device
    config: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    dropout: float = 0.0
    recompute: Any = None
    dispatcher: str = "allgather"
    compile: bool = False
    compile_scope: CompileScope = "stage"
    graphs: GraphBackend | None = None
    data_parallel: DataParallelConfig | None = None
    rule: str = "adam"
    clip_grad: float = 1.0
    loss_scale: LossScaleConfig | None = None
    formats: StateFormatConfig | None = None
    offload: OffloadConfig | None = None
    settings: Any = None

    def __post_init__(self) -> None:
        mesh = Mesh.single(self.device)
        stages = gpt_chunks(
            GPTConfig(**SMALL, **self.config),
            Placement(
                mesh,
                dtype=self.dtype,
                recompute=self.recompute or RecomputeConfig(),
                dispatcher=self.dispatcher,
            ),
            seed=3,
        )
        self.model = stages[0]
        task = GPTTask(
            stages,
            None,
            hidden_dropout=self.dropout,
            attention_dropout=self.dropout,
            reset_attention_mask=True,
        )
        self.engine = StepEngine(
            task,
            mesh,
            self.data_parallel,
            compile=self.compile,
            compile_scope=self.compile_scope,
            graphs=self.graphs,
        )
        self.optimizer = Optimizer(
            self.engine.stages,
            OptimizerConfig(
                optimizer=self.rule,
                lr=LEARNING_RATE,
                clip_grad=self.clip_grad,
                settings=self.settings,
            ),
            loss_scale=self.loss_scale,
            formats=self.formats,
            offload=self.offload,
        )

    def batches(self, iteration: int) -> list[MicroBatch]:
        """Returns two micro-batches of two samples with documents and padding, drawn on the CPU."""
        generator = torch.Generator().manual_seed(iteration)
        documents = torch.tensor([[0] * 7 + [1] * 9, [0] * 12 + [-1] * 4], dtype=torch.int32)
        drawn: Iterator[dict[str, Tensor]] = (
            {
                "tokens": torch.randint(0, 97, (2, 16), generator=generator),
                "labels": torch.randint(0, 97, (2, 16), generator=generator),
                "loss_mask": (documents >= 0).float(),
                "positions": torch.arange(16).expand(2, 16).contiguous(),
                "sample_ids": torch.arange(2) + 4 * iteration + 2 * number,
                "document_ids": documents,
            }
            for number in range(2)
        )
        return [MicroBatch.from_fields(fields, token_field="tokens") for fields in drawn]

    def gradients(self, iteration: int = 1) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Runs the passes of a step; returns losses per token, and gradients on the CPU."""
        batches = self.batches(iteration)
        denominators = self.engine.denominators(batches)
        sums = self.engine.run(batches, denominators, iteration)
        gradients = {n: g.detach().cpu() for n, g in self.engine.stages.gradients().items()}
        return {name: float(sums[name] / denominators[name]) for name in sums}, gradients

    def step(self, iteration: int) -> tuple[dict[str, float], float]:
        """Runs a whole step; returns losses per token and the gradient norm."""
        losses, _ = self.gradients(iteration)
        norm = float(self.optimizer.step(LEARNING_RATE).grad_norm)
        self.engine.stages.zero()
        return losses, norm

    def weights(self) -> dict[str, Tensor]:
        """Returns copies of all parameters on the CPU."""
        self.engine.stages.wait_for_parameters()
        return {name: p.detach().cpu().clone() for name, p in self.engine.stages.parameters.items()}

    def state(self) -> dict[str, Any]:
        """Returns views of all values of its checkpoint."""
        views = {f"model.{name}": v for name, v in self.engine.stages.views().items()}
        views |= {f"optimizer.{name}": v for name, v in self.optimizer.views().items()}
        return views


@pytest.fixture
def job() -> type[Job]:
    """Returns a function that makes a job on a device."""
    return Job


@pytest.fixture
def only_deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Enables deterministic algorithms as `--deterministic-mode` does."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
