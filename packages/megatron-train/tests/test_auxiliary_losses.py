"""Auxiliary losses, which a layer adds within a stage, on several ranks."""

import pytest
import torch
from megatron_parallel import Mesh, ParallelLayout, Sharding
from megatron_parallel.collectives import scatter_to_axis
from megatron_train.engine import StepEngine
from megatron_train.tasks.task import MicroBatch
from torch import nn

SIZE = 8


class Rows(nn.Embedding):
    """An embedding with a penalty on the rows that are looked up: all of them or a rank's half."""

    def __init__(self, mesh, cut):
        super().__init__(SIZE, SIZE, dtype=torch.float64)
        self.axis, self.cut = mesh.axis("tp"), cut
        self.sharding = {"weight": Sharding((SIZE, SIZE))}
        with torch.no_grad():
            self.weight.copy_(torch.arange(SIZE * SIZE).view(SIZE, SIZE).sin())

    def forward(self, tokens, auxiliary_losses=None):
        x = super().forward(tokens).flatten(0, 1)
        part = scatter_to_axis(x, self.axis) if self.cut else x
        replicated = () if self.cut else (self.axis,)
        return auxiliary_losses.attach(x, "size", part.square().sum(), 0.25, replicated=replicated)


class Penalised:
    """A task with the sum of rows as its loss and their penalty as an auxiliary loss."""

    losses, metrics, auxiliary_losses = ("sum",), (), ("size",)

    def __init__(self, mesh, cut):
        self.stages = (Rows(mesh, cut),)

    def denominators(self, batches):
        return dict.fromkeys(("sum", "size"), float(sum(b.tokens for b in batches)))

    def stage_inputs(self, batch, stage, iteration):
        return {"tokens": batch.fields["tokens"]}

    def loss(self, output, batch):
        return {"sum": output.sum()}


@pytest.mark.parametrize("cut", [False, True], ids=["replicated", "cut"])
def test_an_auxiliary_loss_on_tensor_parallel_ranks_equals_that_of_one_rank(worker_pool, cut):
    def step(mesh):
        engine = StepEngine(Penalised(mesh, cut), mesh)
        drawn = (torch.tensor([[1, 2, 5, 1]]) + shift for shift in (0, 2))
        batches = [
            MicroBatch.from_fields({"tokens": tokens}, token_field="tokens") for tokens in drawn
        ]
        sums = engine.run(batches, engine.denominators(batches), 1)
        return {n: float(value) for n, value in sums.items()}, engine.stages.gradients()[
            "weight"
        ].clone()

    sums, gradient = step(Mesh.single())
    for found, theirs in worker_pool.run_mesh(ParallelLayout(tp=2, dp=1), step):
        assert found == pytest.approx(sums, rel=1e-15)
        torch.testing.assert_close(theirs, gradient, rtol=1e-14, atol=0)
