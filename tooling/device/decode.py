"""Generates tokens on an imagined device."""

from typing import Any, Final, cast

from megatron_infer import SamplingParams, generate_tokens
from megatron_models import Placement, find_kind
from megatron_parallel import Mesh
from megatron_parallel.imagined import imagined_device
from megatron_train.assembly import choose_dtype
from megatron_train.config.run import RunConfig

_PROMPTS: Final = (7, 12, 3, 12)
"""Lengths of the prompts."""


def decode(run: RunConfig, pipeline_rank: int, new_tokens: int, device: str) -> dict[str, int]:
    """Returns what a rank does while it generates tokens, half of them sampled, half greedy.

    Args:
        run: The run whose model is used, in its layout.
        pipeline_rank: Coordinate of the rank on the axis ``pp``.
        new_tokens: Number of tokens for each prompt.
        device: Device to imagine, "cuda" or "cpu".
    """
    rank = run.layout.ranks_of_pipeline_rank(pipeline_rank)[0]
    prompts = [list(range(length)) for length in _PROMPTS]
    params = [
        SamplingParams(max_new_tokens=new_tokens, temperature=float(row % 2), top_p=0.9, seed=row)
        for row in range(len(prompts))
    ]
    with Mesh.imagined(run.layout, rank, device) as mesh, imagined_device(device) as ledger:
        placement = Placement(mesh, dtype=choose_dtype(run), device=mesh.device)
        stages = cast("list[Any]", find_kind(run.model.kind).build(run.model, placement))
        ledger.clear()
        generate_tokens(stages, prompts, params, log_probs=True)
    return {
        "waits": ledger.waits.total(),
        "blocking copies": ledger.blocking_copies.total(),
        "kernels": ledger.kernels.total(),
        "element-wise bytes": ledger.bytes_moved.total(),
        "peak bytes": ledger.storages.peak,
    }
