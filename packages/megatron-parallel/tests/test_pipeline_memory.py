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


# Micro-batches in flight on each of four ranks, without those of the first stage, whose inputs
# exist already. The last two ranks of `zb-v` hold more: their weight gradients run later.
@pytest.mark.parametrize(
    ("schedule", "vpp", "mapping", "in_flight"),
    [
        ("1f1b", 1, "loop", {1: 3}),
        ("interleaved-1f1b", 2, "loop", {0: 4, 1: 9, 3: 5}),  # of 2 * 3 + 4 + 1 on the first rank
        ("zb-v", 2, "v", {0: 1, 1: 8}),
        pytest.param("1f1b", 1, "loop", {0: 0, 2: 2, 3: 1}, marks=pytest.mark.slow),
        pytest.param("interleaved-1f1b", 2, "loop", {2: 7}, marks=pytest.mark.slow),
        pytest.param("combined-1f1b", 2, "loop", {0: 4, 1: 9, 2: 7, 3: 5}, marks=pytest.mark.slow),
    ],
)
def test_tensors_of_a_micro_batch_live_while_it_is_in_flight(
    schedule: str, vpp: int, mapping: StageMapping, in_flight: dict[int, int]
) -> None:
    layout = ParallelLayout(pp=4, vpp=vpp, dp=1, stage_mapping=mapping).resolve(4)
    for rank, inputs in in_flight.items():
        # Besides the inputs: an output until it is sent, and gradients of output and input. From
        # 2.15 torch's schedules hold what they sent until the step ends, unless a stage drops it.
        assert max(peaks(schedule, layout, rank, 16)) <= inputs + 4.1
