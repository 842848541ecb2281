"""Memory of a step is bounded by the micro-batches in flight; nothing is kept for the next one."""

import pytest
import torch
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.imagined import imagined_device
from megatron_parallel.mesh import StageMapping
from megatron_parallel.pipeline import PipelineEngine, TensorSpec
from torch import Tensor, nn

HIDDEN = 4
LENGTHS = (4096, 2048)


class Chunk(nn.Module):
    """A linear layer, which saves its input; its parameters are small."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, received: Tensor | None = None, *, given: Tensor | None = None) -> Tensor:
        x = given if received is None else received
        assert x is not None
        result: Tensor = self.linear(x)
        return result


def peaks(schedule: str, layout: ParallelLayout, rank: int, count: int) -> list[float]:
    """Returns the peak of steps of several lengths, in tensors between stages."""
    found = []
    with imagined_device("cpu") as ledger:
        mesh = Mesh.imagined(layout, rank)
        engine = PipelineEngine(
            mesh,
            [Chunk() for _ in layout.stages(rank)],
            lambda output, batch: {"loss": output.sum()},
            inputs=lambda batch, stage: {} if stage else {"given": batch},
            stage_output_spec=lambda batch, stage: TensorSpec(tuple(batch.shape), torch.float32),
            schedule=schedule,
        )
        for length in LENGTHS:
            batch = torch.ones(length, HIDDEN)
            ledger.clear()
            before = ledger.storages.live
            engine.run([batch] * count, {"loss": 1.0})
            assert ledger.storages.live - before < 0.1 * batch.nbytes
            found.append((ledger.storages.peak - before) / batch.nbytes)
        mesh.close()
    return found


# Micro-batches in flight on the first two of four ranks, without those of the first stage, whose
# inputs exist already.
@pytest.mark.parametrize(
    ("schedule", "vpp", "mapping", "in_flight"),
    [
        ("1f1b", 1, "loop", (0, 3)),
        ("interleaved-1f1b", 2, "loop", (4, 9)),  # of 2 * 3 + 4 + 1 on the first rank
        ("zb-v", 2, "v", (1, 8)),
    ],
)
def test_tensors_of_a_micro_batch_live_while_it_is_in_flight(
    schedule: str, vpp: int, mapping: StageMapping, in_flight: tuple[int, int]
) -> None:
    layout = ParallelLayout(pp=4, vpp=vpp, dp=1, stage_mapping=mapping).resolve(4)
    for rank, inputs in enumerate(in_flight):
        # Besides the inputs: an output until it is sent, and gradients of output and input.
        assert max(peaks(schedule, layout, rank, 16)) <= inputs + 4.1
