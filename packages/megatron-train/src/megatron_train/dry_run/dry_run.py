"""The dry run of a run: one rank of each of some pipeline stages."""

from collections.abc import Callable, Sequence

import torch

from megatron_train.config.run import RunConfig
from megatron_train.dry_run.counts import RankUse
from megatron_train.dry_run.rank import imagine_rank

Progress = Callable[[int, int], None]
"""Called with the number of finished ranks and of all ranks."""


def dry_run(
    run: RunConfig,
    device: str,
    pipeline_ranks: Sequence[int],
    progress: Progress | None = None,
) -> list[RankUse]:
    """Returns what ranks of a run need and do in a step.

    Args:
        run: The run, with a resolved layout.
        device: Device to imagine, "cuda" or "cpu".
        pipeline_ranks: Coordinates of the ranks on the axis ``pp``.
        progress: Called after each rank.

    Raises:
        NoGuardError: A CUDA device cannot be imagined in this process.
    """
    found = []
    for number, pipeline_rank in enumerate(pipeline_ranks):
        rank = run.layout.ranks_of_pipeline_rank(pipeline_rank)[0]
        found.append(imagine_rank(run, rank, torch.device(device)))
        if progress is not None:
            progress(number + 1, len(pipeline_ranks))
    return found
