"""Stages that send several tensors, as encoder-decoder models do, under schedules of every kind.

The encoder's stages send their output. The decoder's first stage embeds its own tokens and sends
two tensors: its own and the encoder's, which reaches every decoder layer. All stages send an
integer mask, which has no gradient. The lengths of both sequences differ between steps.
"""

from typing import Any

import pytest
import torch
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.pipeline import PipelineEngine, TensorSpec, stage_parameters
from megatron_parallel.testing import WorkerPool
from torch import Tensor, nn

HIDDEN, VOCAB, STAGES = 6, 9, 4
DECODER = 2  # its first stage
Batch = dict[str, Tensor]


class EncoderDecoder(nn.Module):
    """One layer for each stage of `stages`; more than one only for the reference."""

    def __init__(self, stages: list[int]) -> None:
        super().__init__()
        self.stages = stages
        self.layers = nn.ModuleDict({str(i): nn.Linear(HIDDEN, HIDDEN) for i in stages})
        self.embeddings = nn.ModuleDict(
            {str(i): nn.Embedding(VOCAB, HIDDEN) for i in stages if i in (0, DECODER)}
        )
        self.double()

    def forward(self, *received: Tensor, **tokens: Tensor) -> Any:
        for stage in self.stages:
            received = self.stage(stage, received, tokens)
        return received[0] if self.stages[-1] == STAGES - 1 else received

    def stage(
        self, stage: int, received: tuple[Tensor, ...], tokens: dict[str, Tensor]
    ) -> tuple[Tensor, ...]:
        layer = self.layers[str(stage)]
        if stage == 0:
            text = self.embeddings["0"](tokens["source"])
            return torch.tanh(layer(text)), tokens["keep"]
        if stage < DECODER:
            return torch.tanh(layer(received[0])), received[1]
        if stage == DECODER:
            encoded, keep = received
            decoded = self.embeddings[str(DECODER)](tokens["target"])
        else:
            decoded, encoded, keep = received
        scores = torch.einsum("sh,th->st", layer(decoded), encoded)
        scores = scores.masked_fill(keep == 0, -1e9).softmax(1)
        return decoded + scores @ encoded, encoded, keep


def make(stages: list[int]) -> EncoderDecoder:
    module = EncoderDecoder(stages)
    for name, parameter in module.named_parameters():
        generator = torch.Generator().manual_seed(sum(name.encode()))
        nn.init.normal_(parameter, generator=generator)
    return module


def inputs(batch: Batch, stage: int) -> dict[str, Any]:
    if stage == 0:
        return {"source": batch["source"], "keep": batch["keep"]}
    return {"target": batch["target"]} if stage == DECODER else {}


def stage_output_spec(batch: Batch, stage: int) -> tuple[TensorSpec, ...]:
    source, target = len(batch["source"]), len(batch["target"])
    encoded = TensorSpec((source, HIDDEN), torch.float64), TensorSpec((source,), torch.int64)
    return encoded if stage < DECODER else (TensorSpec((target, HIDDEN), torch.float64), *encoded)


def loss(output: Tensor, batch: Batch) -> dict[str, Tensor]:
    return {"loss": (output**2 * batch["target"][:, None]).sum()}


def batches(source: int, target: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(source * target)
    made = []
    for _ in range(4):
        keep = torch.ones(source, dtype=torch.int64)
        keep[-1] = 0
        made.append(
            {
                "source": torch.randint(VOCAB, (source,), generator=generator),
                "target": torch.randint(VOCAB, (target,), generator=generator),
                "keep": keep,
            }
        )
    return made


LENGTHS = [(5, 3), (4, 7), (5, 3)]


def train(mesh: Mesh, schedule: str) -> list[tuple[float, float, dict[str, Tensor]]]:
    chunks = [make([stage]) for stage in mesh.layout.stages(mesh.axis("pp").index)]
    engine = PipelineEngine(
        mesh, chunks, loss, inputs=inputs, stage_output_spec=stage_output_spec, schedule=schedule
    )
    results = []
    for lengths in LENGTHS:
        parameters = stage_parameters(engine.chunks)
        for parameter in parameters.values():
            parameter.grad = None
        trained = engine.run(batches(*lengths), {"loss": 7.0})["loss"]
        evaluated = engine.evaluate(batches(*lengths)[:3])["loss"]
        gradients = {n: p.grad for n, p in parameters.items()}
        results.append((float(trained), float(evaluated), gradients))
    return results


LAYOUTS = [
    ("1f1b", ParallelLayout(pp=4, dp=1)),
    ("gpipe", ParallelLayout(pp=4, dp=1)),
    ("interleaved-1f1b", ParallelLayout(pp=2, vpp=2, dp=1)),
    ("looped-bfs", ParallelLayout(pp=2, vpp=2, dp=1)),
    ("zero-bubble", ParallelLayout(pp=2, vpp=2, dp=1)),
    ("zb-v", ParallelLayout(pp=2, vpp=2, dp=1, stage_mapping="v")),
    ("dualpipe-v", ParallelLayout(pp=2, vpp=2, dp=1, stage_mapping="v")),
]


@pytest.mark.parametrize(("schedule", "layout"), LAYOUTS, ids=[name for name, _ in LAYOUTS])
def test_stages_pass_several_tensors(
    worker_pool: WorkerPool, schedule: str, layout: ParallelLayout
) -> None:
    ranks = worker_pool.run_mesh(layout, train, schedule)
    for step, lengths in enumerate(LENGTHS):
        whole = make(list(range(STAGES)))
        each = [loss(whole(**b), b)["loss"] for b in batches(*lengths)]
        (torch.stack(each).sum() / 7.0).backward()
        names = set()
        for rank in ranks:
            trained, evaluated, gradients = rank[step]
            assert trained == pytest.approx(float(sum(each)), rel=1e-12)
            assert evaluated == pytest.approx(float(sum(each[:3])), rel=1e-12)
            for name, gradient in gradients.items():
                wanted = whole.get_parameter(name).grad
                assert wanted is not None
                assert (gradient - wanted).abs().max() <= 1e-12 * wanted.abs().max(), name
            names |= set(gradients)
        assert names == {name for name, _ in whole.named_parameters()}
