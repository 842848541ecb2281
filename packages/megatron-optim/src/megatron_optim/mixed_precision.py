"""Full-precision copies of low-precision parameters.

A bf16 number has 8 bits of mantissa, so an update smaller than 1/256 of a weight is lost when it is
added to the weight; an fp16 number has 11. The optimizer therefore updates an fp32 main parameter
and rounds the result into the parameter that the model computes with. Parameters in fp32 and
float64 are their own main parameters and need no copy. Main parameters may also be stored in other
forms (`megatron_optim.stored`), or in host memory, where those of fp32 and float64 parameters are
copies as well (`megatron_optim.offload`).
"""

from collections.abc import Collection, Iterator, Mapping
from zlib import crc32

import torch
from jaxtyping import Float
from megatron_parallel import View, parameter_views
from megatron_parallel.data_parallel import Trainable
from torch import Tensor

from megatron_optim.errors import OptimError
from megatron_optim.offload_config import OffloadConfig
from megatron_optim.state_format_config import StateFormatConfig
from megatron_optim.stored import (
    MainStored,
    Remainder,
    StochasticallyRounded,
    element_hash,
    nearest_high_bits,
)

FULL_PRECISION = (torch.float32, torch.float64)
HALF_PRECISION = (torch.bfloat16, torch.float16)


class MainParameters:
    """The tensors that an optimizer updates on behalf of the parameters of a model.

    Args:
        trainable: The parameters of this rank. Parameters that do not require a gradient are left
            out.
        formats: How main parameters of bf16 parameters are stored. Defaults to fp32 copies.
        seed: Seed of stochastic rounding.
        offload: Which main parameters are in host memory. Defaults to none.

    Attributes:
        tensors: The main parameter of every parameter by name, on the same device or in host
            memory; the parameter itself if its main parameter is stored in another form.
        copies: The main parameters that are fp32 copies on the same device.
        hosted: The main parameters in host memory, in fp32 or float64.
        stored: The main parameters that are stored in another form.
        step: The number of the current step, for stochastic rounding.
    """

    sharded = False
    """Whether each data-parallel rank updates a shard of the parameters instead of all of them."""

    def __init__(
        self,
        trainable: Trainable,
        formats: StateFormatConfig | None = None,
        seed: int = 0,
        offload: OffloadConfig | None = None,
    ) -> None:
        self._trainable = trainable
        self._parameters = self._local_parameters()
        mesh = trainable.mesh
        axes = [mesh.axis(name) for name in ("dp_cp", "expert_dp") if mesh.has_axis(name)]
        self._has_data_ranks = any(axis.size > 1 for axis in axes)
        sizes = {name: parameter.numel() for name, parameter in self._parameters.items()}
        away = (offload or OffloadConfig()).choose(sizes)
        self._formats, self._seed = formats or StateFormatConfig(), seed
        self.step = 0
        self.tensors: dict[str, Tensor] = {}
        self.copies: dict[str, Tensor] = {}
        self.hosted: dict[str, Tensor] = {}
        self.stored: dict[str, MainStored] = {}
        for name, parameter in self._parameters.items():
            if name in away and parameter.dtype in (*FULL_PRECISION, *HALF_PRECISION):
                dtype = update_dtype(parameter)
                main = host_like(parameter, dtype, copied=parameter.dtype == dtype)
                self.tensors[name] = self.hosted[name] = main.copy_(parameter.detach())
            elif parameter.dtype in FULL_PRECISION:
                self.tensors[name] = parameter
            elif parameter.dtype == torch.bfloat16 and self._formats.use_precision_aware_optimizer:
                self.tensors[name] = parameter
                self.stored[name] = self._store(name, parameter)
            elif parameter.dtype in HALF_PRECISION:
                main = parameter.detach().float()
                self.tensors[name] = self.copies[name] = main
            else:
                raise OptimError(
                    f"parameter {name!r} is {parameter.dtype}; "
                    "parameters must be float32, float64, bfloat16 or float16"
                )

    @property
    def trainable(self) -> Trainable:
        """The parameters, their sharding and their gradients."""
        return self._trainable

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The parameters that this rank updates, or its shards of them, by name."""
        return self._parameters

    def values(self) -> Iterator[tuple[str, Float[Tensor, "..."]]]:
        """Yields every main parameter by name, a copy if it is stored in another form."""
        for name, tensor in self.tensors.items():
            stored = self.stored.get(name)
            yield name, tensor.detach() if stored is None else stored.load_all()

    def wait(self) -> None:
        """Returns when parameters may be read and written."""

    def publish(self) -> None:
        """Lets other ranks have the parameters that this rank has changed."""

    def gradients(self) -> dict[str, Float[Tensor, "..."]]:
        """Returns every gradient in the dtype of its main parameter.

        A parameter that the backward pass did not reach has a gradient of zero. Its update
        therefore does not depend on which rank or micro-batch reached it.

        Raises:
            OptimError: The trainable has no gradient for one of its parameters.
        """
        available = self._trainable.gradients()
        if missing := sorted(self.tensors.keys() - available.keys()):
            raise OptimError(
                f"{len(missing)} parameters have no gradient, the first is {missing[0]!r}; build "
                "the buffers and the optimizer from the same parameters"
            )
        gradients = {}
        for name, main in self.tensors.items():
            gradient, dtype = available[name], update_dtype(main)
            if gradient is None:
                gradient = torch.zeros_like(self._parameters[name], dtype=dtype)
            gradients[name] = gradient.to(dtype)
        return gradients

    def _store(self, name: str, parameter: Tensor) -> MainStored:
        """Returns the main parameter of a bf16 parameter in the configured form."""
        if self._formats.main_params_dtype == "fp32":
            return Remainder(parameter)
        number = crc32(name.encode())
        return StochasticallyRounded(
            parameter,
            lambda values: self.views({name: values})[name],
            number,
            lambda numbers, index: element_hash(self._seed, self.step, numbers, index),
        )

    def norm_terms(
        self, gradients: Mapping[str, Float[Tensor, "..."]]
    ) -> tuple[Mapping[str, Float[Tensor, "..."]], bool]:
        """Returns what this rank adds to the norm, and whether it is sharded over the data axis.

        A rank with whole gradients adds only the shard that it would have if they were sharded.
        The norm is then equal to the last bit in both cases, and takes less time.
        """
        whole = self.sharded or not self._has_data_ranks
        shards = None if whole else self._trainable.shard_gradients()
        if shards is None:
            return gradients, self.sharded
        tensors = self.tensors
        return {name: g.to(update_dtype(tensors[name])) for name, g in shards.items()}, True

    def _local_parameters(self) -> dict[str, Tensor]:
        """Returns the parameters that this rank updates, by name."""
        parameters = self._trainable.parameters
        return {name: p for name, p in parameters.items() if p.requires_grad}

    @property
    def rounded(self) -> dict[str, Tensor]:
        """The model's parameters that the fp32 copies are rounded into."""
        return {name: self._parameters[name] for name in self.copies}

    @torch.no_grad()
    def copy_main_to_model(self, done: Collection[str] = ()) -> None:
        """Rounds the fp32 copies into the model's parameters, in one operation.

        Args:
            done: The names of those that are rounded already. Defaults to none.
        """
        if left := [name for name in self.copies if name not in done]:
            sources = [self.copies[name] for name in left]
            torch._foreach_copy_([self._parameters[name] for name in left], sources)

    @torch.no_grad()
    def round_hosted(self, name: str, rounded: Float[Tensor, "..."]) -> None:
        """Rounds a main parameter in host memory as it would be rounded on the device.

        Args:
            name: The name of the parameter.
            rounded: A tensor in the parameter's shape and dtype.
        """
        main, aware = self.hosted[name], self._formats.use_precision_aware_optimizer
        if aware and rounded.dtype == torch.bfloat16:
            rounded.view(torch.int16).copy_(nearest_high_bits(main.view(torch.int32)))
        else:
            rounded.copy_(main)

    @torch.no_grad()
    def copy_model_to_main(self) -> None:
        """Copies the model's parameters to the fp32 copies, after weights were loaded."""
        for name, main in (self.copies | self.hosted).items():
            main.copy_(self._parameters[name])
        for stored in self.stored.values():
            stored.reset()

    @torch.no_grad()
    def copy_model_to_unsaved(self) -> None:
        """Copies the model's parameters to the copies that a checkpoint does not have."""
        saved = self.saved
        if unsaved := self.hosted.keys() - saved.keys():
            self.wait()
            for name in unsaved:
                self.hosted[name].copy_(self._parameters[name])

    @property
    def saved(self) -> dict[str, Tensor | MainStored]:
        """The main parameters that a checkpoint has besides the model's parameters."""
        rounded = StochasticallyRounded
        stored = {n: each for n, each in self.stored.items() if not isinstance(each, rounded)}
        half = {n: t for n, t in self.hosted.items() if self._parameters[n].dtype != t.dtype}
        return {**self.copies, **stored, **half}

    def views(self, tensors: Mapping[str, Tensor]) -> dict[str, list[View]]:
        """Returns views of tensors shaped like the main parameters, for a checkpoint."""
        return parameter_views(tensors, self._trainable.table, self._trainable.mesh)


def host_like(
    tensor: Float[Tensor, "..."], dtype: torch.dtype, *, copied: bool
) -> Float[Tensor, "..."]:
    """Returns an uninitialized tensor on the host.

    Args:
        tensor: A tensor of the same shape.
        dtype: Its dtype.
        copied: Whether it is copied between the devices in each step. It is then in pinned memory
            if ``tensor`` is on a GPU.
    """
    return torch.empty_like(
        tensor,
        dtype=dtype,
        device="cpu",
        pin_memory=copied and tensor.is_cuda,
        requires_grad=False,
        memory_format=torch.contiguous_format,
    )


def update_dtype(tensor: Tensor) -> torch.dtype:
    """Returns the dtype that a parameter is updated in: its own if it is full, otherwise fp32."""
    return tensor.dtype if tensor.dtype in FULL_PRECISION else torch.float32
