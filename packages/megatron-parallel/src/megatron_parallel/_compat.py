"""Every contact with private or fast-moving parts of torch, in one place."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d
from torch.nn import Parameter

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

    from megatron_parallel.collective_failure import naming_failures
    from megatron_parallel.pipeline.order import Action

Store = _distributed_c10d.Store  # torch.distributed has this, but its type stubs hide it

# torch 2.13 renamed these two and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `whole` with the parts of all members, along dim 0."""
    _all_gather(whole, part, group=group)


def reduce_scatter(
    part: Tensor, whole: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> None:
    """Fill `part` with this member's part, along dim 0, of the reduced `whole`."""
    _reduce_scatter(part, whole, op, group=group)


def start_all_reduce(t: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start summing `t` in place."""
    return _started(dist.all_reduce(t, group=group, async_op=True))


def start_all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start filling `whole` with the parts of all members; `part` may be a view of it."""
    return _started(_all_gather(whole, part, group=group, async_op=True))


def start_reduce_scatter(part: Tensor, whole: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start summing this member's part of `whole` into `part`, which may be a view of it."""
    return _started(_reduce_scatter(part, whole, group=group, async_op=True))


def start_all_to_all(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start sending each member its part of `sent`, along dim 0."""
    return _started(dist.all_to_all_single(received, sent, group=group, async_op=True))


def gradient_wanted(ctx: Any, index: int) -> bool:
    """Whether the backward pass under way needs a function's gradient of its input `index`.

    `ctx.needs_input_grad` says whether any pass does; a split one needs some at a time. `index`
    counts the inputs that are tensors, which must come first.
    """
    if not ctx.needs_input_grad[index]:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(ctx.next_functions[index][0]))
    except RuntimeError:  # torch does not say so of a leaf that autograd.grad was asked for
        return True


def gradient_returned(ctx: Any, index: int) -> bool:
    """Whether the backward pass under way returns the gradient of a leaf, a function's input.

    That is `torch.autograd.grad`; `backward` adds it to `.grad` and calls hooks. `index` counts as
    in `gradient_wanted`.
    """
    try:
        torch._C._will_engine_execute_node(ctx.next_functions[index][0])
    except RuntimeError:  # torch refuses to answer for such a leaf, and for no other
        return True
    return False


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:  # only to ranks outside of the group
        raise RuntimeError("the collective gave no work to wait for")
    return work


class ShardedStage:
    """What torch's `fully_shard` has made of a stage and its units."""

    def __init__(self, units: Sequence[Any]) -> None:
        self._units = units  # the stage itself comes last

    def sum_gradients(self, wanted: bool) -> None:
        """Whether the next backward pass sums gradients over the ranks, or only adds them up."""
        self._units[-1].set_requires_gradient_sync(wanted)

    def reshard(self) -> None:
        """Drop gathered parameters."""
        for unit in self._units:
            unit.reshard()


def fully_shard(
    module: nn.Module,
    units: Sequence[nn.Module],
    *,
    inner: dist.ProcessGroup,
    outer: dist.ProcessGroup | None,
    ranks: list[list[int]],
    device: str,
    dim_of: Callable[[Parameter], int],
    reduce_dtype: torch.dtype | None,
    keep_gathered: bool,
    started: Callable[[str, Tensor], None],
    naming: "Callable[[str, Tensor], naming_failures]",
) -> ShardedStage:
    """Cut the parameters of `module` over `inner`; gradients are sums, over `outer` too.

    `ranks` are the global ranks of both groups, a row for each inner one. `started` is told of each
    all-gather and reduce-scatter, and in what `naming` returns they start and are waited for.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as shard
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.tensor import Shard

    class NamedWork(dist.Work):
        """torch waits for it long after the call, elsewhere."""

        def __init__(self, work: dist.Work, named: "naming_failures") -> None:
            super().__init__()
            self._work, self._named = work, named

        def wait(self, *timeout: timedelta) -> bool:
            with self._named:
                return bool(self._work.wait(*timeout))

    class Allocating:
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

    class Gather(Allocating, AllGather):
        def __call__(
            self,
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: dist.ProcessGroup,
            async_op: bool = False,
        ) -> dist.Work | None:
            started("all_gather", input_tensor)
            named = naming("all_gather", input_tensor)
            with named.starting() if async_op else named:
                work: dist.Work | None = _all_gather(
                    output_tensor, input_tensor, group=group, async_op=async_op
                )
            return None if work is None else NamedWork(work, named)

    class Scatter(Allocating, ReduceScatter):
        def __call__(
            self,
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: dist.ProcessGroup,
            op: Any,
            async_op: bool = False,
        ) -> dist.Work | None:
            started("reduce_scatter", input_tensor)
            named = naming("reduce_scatter", input_tensor)
            with named.starting() if async_op else named:
                work: dist.Work | None = _reduce_scatter(
                    output_tensor, input_tensor, op, group=group, async_op=async_op
                )
            return None if work is None else NamedWork(work, named)

    if outer is None:
        grid = DeviceMesh.from_group(inner, device, mesh_dim_names=("shard",))
    else:
        names = ("replicate", "shard")
        grid = DeviceMesh.from_group([outer, inner], device, mesh=ranks, mesh_dim_names=names)
    options: dict[str, Any] = {
        "mesh": grid,
        "shard_placement_fn": lambda parameter: Shard(dim_of(parameter)),
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False),
    }
    sharded: list[Any] = [
        shard(unit, reshard_after_forward=not keep_gathered, **options) for unit in units
    ]
    sharded.append(shard(module, reshard_after_forward=False, **options))
    for unit in sharded:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_custom_all_gather(Gather())
        unit.set_custom_reduce_scatter(Scatter())
    return ShardedStage(sharded)


@torch.no_grad()
def local_part(t: Tensor) -> Tensor:
    """What this rank holds of a `DTensor`, in the same memory."""
    part: Tensor = t._local_tensor  # type: ignore[attr-defined]
    return part


def tcp_store(
    address: str, port: int, size: int, timeout: timedelta, listener: int | None = None
) -> Store:
    """Return the key-value store of `size` ranks, when all of them have come.

    The rank that keeps it gives `listener`, a socket's descriptor, which torch takes over.
    """
    return _distributed_c10d.TCPStore(
        address,
        port,
        size,
        is_master=listener is not None,
        timeout=timeout,
        master_listen_fd=listener,
    )


def default_store() -> Store:
    """The key-value store the default process group was built on."""
    return distributed_c10d._get_default_store()


def abort_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """Give up what is under way on these groups and the default one, from any thread."""
    whole = [*groups, *([dist.group.WORLD] if dist.is_initialized() and dist.group.WORLD else [])]
    nccl: Any = None
    if dist.is_nccl_available():
        found = [group._get_backend(torch.device("cuda")) for group in whole if _has_nccl(group)]
        nccl = next(iter(found), None)
    if nccl is not None:  # in one NCCL group, else aborts of several communicators may deadlock
        nccl._group_start()
    for group in whole:
        group.abort()
    if nccl is not None:
        nccl._group_end()


def _has_nccl(group: dist.ProcessGroup) -> bool:
    return "nccl" in dist.get_backend_config(group)


def new_groups(
    groups: list[tuple[int, ...]], timeout: timedelta
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Create process groups, on all ranks in the same order; returns those this rank is in."""
    mine = {}
    rank = dist.get_rank()
    for ranks in groups:
        group = dist.new_group(list(ranks), timeout=timeout)
        if rank in ranks:
            mine[ranks] = group
    return mine


def no_compiled_code() -> AbstractContextManager[object]:
    """In the `with` block, functions that torch.compile has compiled run as they were written."""
    from torch.compiler import set_stance

    stance: AbstractContextManager[object] = set_stance("force_eager")
    return stance


def saved_tensors_hooks_in_force() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The innermost `saved_tensors_hooks` in force, which hooks entered from now on replace."""
    from torch._C import _autograd

    found: tuple[Callable[..., Any], Callable[..., Any]] | None
    found = _autograd._top_saved_tensors_default_hooks(False)
    return found


def weak_storage(storage: torch.UntypedStorage) -> Any:
    """A reference that does not keep a storage; its `expired()` says whether nobody else does."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def living_storage(weak: Any) -> torch.UntypedStorage | None:
    """The storage that `weak_storage` refers to, unless it is gone."""
    found: torch.UntypedStorage | None
    found = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
    return found


def schedule_1f1b(stage: "PipelineStage", micro_batches: int, loss: Callable[..., Tensor]) -> Any:
    """1F1B for any number of micro-batches.

    torch's constructor refuses fewer than there are stages, though its loop runs them.
    """
    from torch.distributed.pipelining import Schedule1F1B

    count = max(micro_batches, stage.num_stages)
    schedule = Schedule1F1B(stage, count, loss_fn=loss, scale_grads=False)
    schedule._n_microbatches = micro_batches
    return schedule


class PairedPass(NamedTuple):
    """One pass of a pair: what it is, what waits for its input, and what runs it then."""

    action: "Action"
    receive: Callable[[], None]
    run: Callable[[], None]


def schedule_of_turns(
    stages: "Sequence[PipelineStage]",
    micro_batches: int,
    loss: Callable[..., Tensor],
    plans: "Sequence[Sequence[tuple[Action, ...]]]",
    run_pair: Callable[[PairedPass, PairedPass], None],
) -> Any:
    """A schedule of our own: torch adds to the plan of each rank what is sent and received.

    Of a pair, `run_pair` is given the forward and the backward pass.
    """
    from torch.distributed.pipelining import schedules as torchs

    kinds = torchs._ComputationType
    here = {stage.stage_index: stage for stage in stages}
    schedule: Any = torchs._PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
        list(stages), micro_batches, loss_fn=loss, scale_grads=False
    )

    def theirs(action: "Action") -> Any:
        return torchs._Action(action.stage, kinds(action.kind), action.micro_batch)

    ours = {theirs(action): action for plan in plans for turn in plan for action in turn}

    def forward(stage: Any, number: int, context: Any) -> None:
        output = stage.forward_one_chunk(
            number,
            context.arg_mbs[number],
            context.kwarg_mbs[number],
            save_forward_output=False,
        )
        schedule._maybe_compute_loss(stage, output, context.target_mbs, number)

    def backward(stage: Any, number: int, context: Any) -> None:
        schedule.backward_counter[stage.stage_index] += 1
        stage.backward_one_chunk(
            number,
            loss=schedule._maybe_get_loss(stage, number),
            full_backward=True,
            last_backward=schedule.backward_counter[stage.stage_index] == micro_batches,
        )

    def one_of_pair(action: Any, context: Any) -> PairedPass:
        stage, number = here[action.stage_index], action.microbatch_index
        ahead = action.computation_type == kinds.FORWARD
        there = schedule.fwd_recv_ops if ahead else schedule.bwd_recv_ops
        run = partial(forward if ahead else backward, stage, number, context)

        def receive() -> None:
            for work in there.pop((action.stage_index, number), ()):
                work.wait()

        return PairedPass(ours[action], receive, run)

    def overlapped(action: Any, context: Any) -> None:
        run_pair(*(one_of_pair(each, context) for each in action.sub_actions))

    schedule.register_custom_function(kinds.OVERLAP_F_B, overlapped)
    schedule.pipeline_order = {
        rank: [
            theirs(turn[0])
            if len(turn) == 1
            else torchs._Action(-1, kinds.OVERLAP_F_B, None, tuple(map(theirs, turn)))
            for turn in plan
        ]
        for rank, plan in enumerate(plans)
    }
    schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    return schedule


def run_schedule(
    schedule: Any,
    stages: "Sequence[PipelineStage]",
    micro_batches: Sequence[Any],
    *,
    backward: bool,
) -> None:
    """One step over micro-batches as they are; torch's `step` would split a batch of tensors.

    Each micro-batch is the target of the loss and the keyword argument `micro_batch` of stages.
    """
    schedule._has_backward = backward
    schedule._internal_losses.clear()
    for stage in stages:
        stage.has_backward = backward
        stage.clear_runtime_states()
    try:
        with _quiet(logging.getLogger("torch.distributed.pipelining.schedules")):
            schedule._step_microbatches(
                [()] * len(micro_batches),
                [{"micro_batch": micro_batch} for micro_batch in micro_batches],
                list(micro_batches),
                return_outputs=False,
            )
    finally:
        for stage in stages:
            stage.clear_runtime_states()


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Errors of this logger are details: it dumps whole schedules, and the error is raised too."""

    def demote(record: logging.LogRecord) -> bool:
        if record.levelno > logging.DEBUG:
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
        return logger.isEnabledFor(record.levelno)

    logger.addFilter(demote)
    try:
        yield
    finally:
        logger.removeFilter(demote)
