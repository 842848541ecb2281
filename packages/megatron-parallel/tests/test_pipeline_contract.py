"""torch's schedules call a stage in the order for which the stage was written.

`Stage` overrides methods that torch calls in an order without guarantee. `schedule_calls.json`
records that order for each torch version that was checked. An unknown version fails: `python
test_pipeline_contract.py` records it; check a new record before you trust it.

A call is a letter, the stage and the micro-batch: F, B, I, W are passes (`*`: marked as the last
backward pass), `r` and `s` request receives and sends, `l` passes tensors on the same rank, R is
the reduction of gradients.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.pipeline import PipelineEngine, TensorSpec
from megatron_parallel.testing import WorkerPool
from torch import Tensor, nn

RECORD = Path(__file__).with_name("schedule_calls.json")
TORCH = ".".join(torch.__version__.split(".")[:2])
V2 = ParallelLayout(pp=2, vpp=2, dp=1, stage_mapping="v")
VPP2 = ParallelLayout(pp=2, vpp=2, dp=1)
PP2 = ParallelLayout(pp=2, dp=1)
CASES = {
    "gpipe": PP2,
    "1f1b": PP2,
    "interleaved-1f1b": VPP2,
    "combined-1f1b": VPP2,
    "looped-bfs": VPP2,
    "zero-bubble": VPP2,
    "zb-v": V2,
    "dualpipe-v": V2,
}


def calls(mesh: Mesh, schedule: str) -> dict[str, str]:
    """Returns calls of this rank's stages in a step of 4 micro-batches and an evaluation of 3."""
    from megatron_parallel.pipeline import runner, stage

    seen: list[str] = []

    class Recorder(stage.Stage):
        def __getattribute__(self, name: str) -> Any:
            found = object.__getattribute__(self, name)
            letter = LETTERS.get(name)
            if letter is None:
                return found

            def recorded(*arguments: Any, **options: Any) -> Any:
                where = "" if letter == "R" else f".{micro_batch(name, arguments)}"
                last = "*" if options.get("last_backward") else ""
                kind = "I" if options.get("full_backward") is False else letter
                seen.append(f"{kind}{self.stage_index}{where}{last}")
                return found(*arguments, **options)

            return recorded

    plain, runner.Stage = runner.Stage, Recorder  # type: ignore[misc]
    try:
        engine = PipelineEngine(
            mesh,
            [nn.Linear(2, 2) for _ in range(mesh.layout.vpp)],
            lambda output, batch: {"loss": output.sum()},
            inputs=lambda batch, index: {"input": batch} if index == 0 else {},
            stage_output_spec=lambda batch, index: TensorSpec((1, 2), torch.float32),
            schedule=schedule,
        )
        batches: list[Tensor] = [torch.ones(1, 2)] * 4
        engine.run(batches, {"loss": 1.0})
        step, _ = " ".join(seen), seen.clear()  # type: ignore[func-returns-value]
        engine.evaluate(batches[:3])
        return {"step": step, "evaluation": " ".join(seen)}
    finally:
        runner.Stage = plain  # type: ignore[misc]


LETTERS = {
    "forward_one_chunk": "F",
    "backward_one_chunk": "B",
    "backward_weight_one_chunk": "W",
    "get_fwd_recv_ops": "rF",
    "get_bwd_recv_ops": "rB",
    "get_fwd_send_ops": "sF",
    "get_bwd_send_ops": "sB",
    "set_local_fwd_input": "lF",
    "set_local_bwd_input": "lB",
    "perform_reduce_grad": "R",
}


def micro_batch(name: str, arguments: tuple[Any, ...]) -> int:
    return int(arguments[1 if name.startswith("set_local") else 0])


@pytest.mark.parametrize("schedule", CASES)
def test_a_schedule_calls_a_stage_as_recorded(worker_pool: WorkerPool, schedule: str) -> None:
    recorded = json.loads(RECORD.read_text()).get(TORCH)
    assert recorded is not None, f"no calls of torch {TORCH}: run {Path(__file__).name} as a file"
    assert worker_pool.run_mesh(CASES[schedule], calls, schedule) == recorded[schedule]


def record() -> None:
    """Adds this torch version to the record."""
    with WorkerPool(max_ranks=2) as pool:
        found = {name: pool.run_mesh(layout, calls, name) for name, layout in CASES.items()}
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    RECORD.write_text(json.dumps({**known, TORCH: found}, indent=1) + "\n")


if __name__ == "__main__":
    record()
