"""State of a module that is not a parameter, such as biases of experts and running statistics.

    class Centred(nn.Module):
        def __init__(self, width, mesh):
            super().__init__()
            self.sharding = {"mean": Sharding((width,), reduce="sum", init=ZEROS)}
            StepState(self, "mean", mesh, update)  # adds the buffer `mean`

        def forward(self, x):
            return self.states["mean"].observe(x - self.mean, x.detach().sum((0, 1)))

Such a tensor changes once a step, from the observations of all micro-batches on all ranks, and is
the same for every layout. Its row in the sharding table defines how it is cut and how observations
are combined (`Sharding.reduce`). It is a buffer of its module, so `Module.to` moves it, and it has
views like a parameter, so checkpoints store it.

Observations are combined over the same ranks as a gradient with the same sharding: data-parallel
and context-parallel ranks, and those of `Sharding.partial`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.autograd import Function

from megatron_parallel.collectives.operations import all_reduce
from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.axes import Axis
from megatron_parallel.mesh.mesh import Mesh
from megatron_parallel.sharding.sharding import Sharding

Update = Callable[[Tensor, Tensor], Tensor]
"""`update(value, observed)` returns the value after a step. Called equally on every rank.

Without observations, `observed` is 0, or -inf with `reduce="max"`.
"""


class StepState:
    """A buffer of a module that is updated once a step from observations.

    Registers the buffer ``name`` of the module, filled with the constant ``init`` of its sharding,
    and adds this object to the attribute ``states`` of the module.

    Args:
        module: Owner of the buffer. Its attribute `sharding` has a row for ``name``.
        name: Name of the buffer.
        mesh: Mesh of this rank.
        update: Returns the value after a step.
        parameter: Name of a parameter of the module to which the state belongs, such as a history
            of its largest values. The global name is then ``parameter.name``, like that of a state
            of the optimizer: a checkpoint stores both together, and models are loaded without
            them. Defaults to none, for state that the model needs.
        observation_shape: Shape of an observation. Defaults to the local shape of the value.
        dtype: Data type of the value. Observations are float64.
        device: Device of the value. Defaults to the device of the mesh.

    Raises:
        LayoutError: The sharding is that of a parameter, or its `init` is not a constant.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        mesh: Mesh,
        update: Update,
        *,
        parameter: str = "",
        observation_shape: tuple[int, ...] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        table: dict[str, Sharding] = getattr(module, "sharding", {})
        if name not in table or table[name].reduce is None:
            raise LayoutError(
                f"state {name!r} of {type(module).__name__} needs a row in its attribute "
                "'sharding', with reduce='sum' or 'max'"
            )
        self.sharding = table[name]
        if self.sharding.init.kind != "constant":
            raise LayoutError(
                f"state {name!r} of {type(module).__name__} has {self.sharding.init.kind!r} "
                "initial values: give its sharding a constant init"
            )
        shape = self.sharding.local_shape(mesh)
        self._module, self._name, self._mesh = module, name, mesh
        self.path = f"{parameter}.{name}" if parameter else name
        self.of_parameter = bool(parameter)
        self._update = update
        self._shape = shape if observation_shape is None else observation_shape
        self._observed: Tensor | None = None
        where = mesh.device if device is None else torch.device(device)
        value = torch.full(shape, self.sharding.init.scale, dtype=dtype, device=where)
        module.register_buffer(name, value)
        states: dict[str, StepState] = vars(module).setdefault("states", {})
        states[name] = self

    @property
    def value(self) -> Float[Tensor, "..."]:
        """The buffer."""
        return self._module.get_buffer(self._name)

    def observe(self, x: Float[Tensor, "*shape"], seen: Tensor) -> Float[Tensor, "*shape"]:
        """Returns `x`. Its backward pass adds `seen` to the observations of this step.

        An evaluation has no backward pass and adds nothing. A forward pass that is recomputed
        (activation checkpointing) counts once. If `x` needs no gradient, for example because all
        parameters before it are frozen, a forward pass in training mode with gradients enabled adds
        `seen`.

        Args:
            x: A tensor that the backward pass differentiates.
            seen: This rank's part of the observation of the micro-batch.
        """
        if not x.requires_grad:  # no backward pass, for example with frozen parameters
            if torch.is_grad_enabled() and self._module.training:
                self.add(seen)
            return x
        seen = self._checked(seen)
        largest = self.sharding.reduce == "max"
        observed: Tensor = _Observe.apply(x, seen, self._total(seen), largest)  # type: ignore[no-untyped-call]
        return observed

    def add(self, seen: Tensor) -> None:
        """Adds to the observations of this step at once.

        For observations that a backward pass makes itself. With `reduce="sum"`, a backward pass
        that is split must call it only once.

        Args:
            seen: This rank's part of the observation of the micro-batch.
        """
        seen = self._checked(seen)
        _add(self._total(seen), seen, self.sharding.reduce == "max")

    def begin(self) -> None:
        """Allocates the observations of this step, unless there are some.

        Compiled code whose backward pass calls `add` needs them: it can add to a tensor, but not
        make one that outlives it.
        """
        if self._observed is None:
            self._observed = self.observed()

    def reset(self) -> None:
        """Discards the observations of the current step."""
        self._observed = None

    def observed(self) -> Float[Tensor, "..."]:
        """Returns the observations of this rank in this step, in float64."""
        if self._observed is not None:
            return self._observed
        nothing = -math.inf if self.sharding.reduce == "max" else 0.0
        return self.value.new_full(self._shape, nothing, dtype=torch.float64)

    @torch.no_grad()
    def step(self, unless: Bool[Tensor, ""] | None = None) -> None:
        """Combines the observations of all ranks and updates the value. A collective call.

        Args:
            unless: A scalar on the device, equal on all ranks. If it is true, the value stays.
        """
        total = self.observed()
        for axis in _reduction_axes(self.sharding, self._mesh):
            operation = self.sharding.reduce or "sum"
            total = all_reduce(total, axis, op=operation, purpose=f"state {self._name!r}")
        self.update(total, unless)

    @torch.no_grad()
    def update(self, total: Float[Tensor, "..."], unless: Bool[Tensor, ""] | None = None) -> None:
        """Updates the value from the observations of all ranks.

        Args:
            total: The combined observations.
            unless: See `step`.
        """
        value = self.value
        updated = self._update(value, total)
        value.copy_(updated if unless is None else torch.where(unless, value, updated))
        self._observed = None

    def _checked(self, seen: Tensor) -> Tensor:
        """Returns an observation in float64, without gradient."""
        if tuple(seen.shape) != self._shape:
            raise LayoutError(
                f"state {self._name!r} observes tensors of shape {self._shape}, not "
                f"{tuple(seen.shape)}"
            )
        return seen.detach().double()

    def _total(self, like: Tensor) -> Tensor:
        """Returns the tensor to which observations are added in place."""
        if self._observed is None:
            nothing = -math.inf if self.sharding.reduce == "max" else 0.0
            self._observed = torch.full_like(like, nothing)
        return self._observed


def _add(total: Tensor, seen: Tensor, largest: bool) -> None:
    """Adds an observation to a total in place, which compiled code can do too."""
    if largest:
        total.copy_(torch.maximum(total, seen))
    else:
        total.add_(seen)


@torch.no_grad()
def step_states(
    states: Mapping[str, StepState], mesh: Mesh, unless: Bool[Tensor, ""] | None = None
) -> None:
    """Calls `StepState.step` of all states, with one message for those combined alike.

    Args:
        states: States by global name.
        mesh: Mesh of this rank.
        unless: See `StepState.step`.
    """
    groups: dict[tuple[str | None, ...], list[str]] = {}
    for name, state in states.items():
        axes = _reduction_axes(state.sharding, mesh)
        groups.setdefault((state.sharding.reduce, *(axis.name for axis in axes)), []).append(name)
    for members in groups.values():
        sharding = states[members[0]].sharding
        seen = [states[name].observed() for name in members]
        total = torch.cat([each.flatten() for each in seen])
        purpose = f"state {members[0]!r} and {len(members) - 1} more"
        for axis in _reduction_axes(sharding, mesh):
            total = all_reduce(total, axis, op=sharding.reduce or "sum", purpose=purpose)
        parts = torch.split(total, [each.numel() for each in seen])
        for name, part, each in zip(members, parts, seen, strict=True):
            states[name].update(part.view(each.shape), unless)


def collect_states(modules: Iterable[nn.Module]) -> dict[str, StepState]:
    """Returns the states of modules and of their submodules by global name, in order of modules.

    Raises:
        LayoutError: Two modules have a state with the same global name.
    """
    found: dict[str, StepState] = {}
    for module in modules:
        for prefix, owner in module.named_modules():
            states: dict[str, StepState] = vars(owner).get("states", {})
            for state in states.values():
                path = f"{prefix}.{state.path}" if prefix else state.path
                if path in found:
                    raise LayoutError(f"two stages of this rank have a state {path!r} each")
                found[path] = state
    return found


def _reduction_axes(sharding: Sharding, mesh: Mesh) -> list[Axis]:
    """Returns the axes over which observations are combined: those of a gradient."""
    layout = mesh.layout
    if sharding.experts:
        data = "expert_dp"
    else:
        data = "dp_cp" if layout.cp > 1 or layout.hybrid_cp else "dp"
    names = [data] if sharding.partial is None else [data, sharding.partial]
    return [mesh.axis(name) for name in names]


class _Observe(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor, total: Tensor, largest: bool) -> Tensor:
        ctx.seen, ctx.total, ctx.largest = seen, total, largest
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.total is not None:
            _add(ctx.total, ctx.seen, ctx.largest)
            ctx.total = None  # a split backward pass calls this twice
        return grads[0], None, None, None
