"""The dry run of a run: one rank of each of some pipeline stages."""

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import cast

import torch

from megatron_train.config.run import RunConfig
from megatron_train.dry_run.counts import RankUse
from megatron_train.dry_run.rank import imagine_rank
from megatron_train.errors import TrainError

Progress = Callable[[int, int], None]
"""Called with the number of finished ranks and of all ranks."""


def dry_run(
    run: RunConfig,
    device: str,
    pipeline_ranks: Sequence[int],
    progress: Progress | None = None,
    *,
    processes: int = 1,
    memory_only: bool = False,
) -> list[RankUse]:
    """Returns what ranks of a run need and do in a step.

    Args:
        run: The run, with a resolved layout.
        device: Device to imagine, "cuda" or "cpu".
        pipeline_ranks: Coordinates of the ranks on the axis ``pp``.
        progress: Called after each rank.
        processes: Number of ranks that run at once. With more than one, all ranks run in forked
            processes. That needs a platform with fork, and a process without autograd's threads: a
            backward pass on a device starts them, from torch 2.15 also one on tensors without
            values.
        memory_only: As for `imagine_rank`.

    Raises:
        NoGuardError: A CUDA device cannot be imagined in this process.
        TrainError: Ranks share documents by their lengths, which are unknown; or a process cannot
            run a backward pass, because this one has; or it ended without a result, for example for
            lack of memory.
    """
    if run.layout.hybrid_cp:
        raise TrainError(
            "--hybrid-context-parallel: ranks share the documents of a step by their lengths, "
            "which a dry run does not know; dry-run the job with --context-parallel-size N"
        )
    ranks = [run.layout.ranks_of_pipeline_rank(each)[0] for each in pipeline_ranks]

    def imagine(rank: int) -> RankUse:
        return imagine_rank(run, rank, torch.device(device), memory_only=memory_only)

    def report(done: int) -> None:
        if progress is not None:
            progress(done, len(ranks))

    if processes > 1:  # also for a single rank, so that this process can fork again
        return _at_once(imagine, ranks, processes, report)
    found = []
    for rank in ranks:
        found.append(imagine(rank))
        report(len(found))
    return found


def _at_once(
    imagine: Callable[[int], RankUse],
    ranks: Sequence[int],
    processes: int,
    report: Callable[[int], None],
) -> list[RankUse]:
    """Returns the results of ranks, of which some run at once in forked processes."""
    fork = multiprocessing.get_context("fork")  # torch is imported and its guard loaded already
    waiting, found = list(ranks), dict[int, RankUse]()
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                rank = waiting.pop(0)
                receiver, sender = fork.Pipe(duplex=False)
                process: BaseProcess = fork.Process(
                    target=_send, args=(sender, imagine, rank), daemon=True
                )
                process.start()
                sender.close()
                running[receiver] = rank, process
            for receiver in cast("list[Connection]", wait(list(running))):
                rank, process = running.pop(receiver)
                found[rank] = _receive(receiver, rank, process)
                report(len(found))
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()
    return [found[rank] for rank in ranks]


def _send(sender: Connection, imagine: Callable[[int], RankUse], rank: int) -> None:
    """Sends the result of a rank, or the error of a user, to the process that started this one."""
    try:
        sender.send(imagine(rank))
    except KeyboardInterrupt:  # the other process reports it
        pass
    except ValueError as error:
        sender.send(error)
    except RuntimeError as error:
        if "fork" not in str(error):
            raise
        sender.send(
            TrainError(
                "processes > 1: this process has run a backward pass on a device or on "
                "tensors without values, and torch runs none in a fork of it; pass processes=1, or "
                "call dry_run in another process"
            )
        )


def _receive(receiver: Connection, rank: int, process: BaseProcess) -> RankUse:
    try:
        result: RankUse | ValueError = receiver.recv()
    except EOFError:
        process.join()
        raise TrainError(
            f"the process of rank {rank} ended without a result (exit code {process.exitcode}); "
            "free memory, or give one of --pipeline-ranks at a time"
        ) from None
    process.join()
    if isinstance(result, ValueError):
        raise result
    return result
