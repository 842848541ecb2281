"""Settings of optimizer state in host memory, with Megatron-LM's names. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_optim.config import OptimizerConfig
from megatron_optim.errors import OptimError
from megatron_optim.fields import flag
from megatron_optim.state_format_config import StateFormatConfig
from megatron_optim.update_rule import build_rules

GRADIENT_BYTES = MAIN_BYTES = 4
"""Bytes of an offloaded element's gradient and main parameter on the host, in fp32."""


@dataclass(frozen=True)
class OffloadConfig:
    """Which optimizer state is in host memory (`megatron_optim.offload`).

    Raises:
        OptimError: A value is out of range, or has no effect.
    """

    optimizer_cpu_offload: bool = field(
        default=False,
        metadata=flag(
            "--optimizer-cpu-offload",
            "keep main weights and optimizer state in host memory, and update them there",
        ),
    )
    optimizer_offload_fraction: float = field(
        default=1.0,
        metadata=flag(
            "--optimizer-offload-fraction",
            "largest share of the optimizer state that --optimizer-cpu-offload keeps on the host",
        ),
    )
    overlap_cpu_optimizer_d2h_h2d: bool = field(
        default=False,
        metadata=flag(
            "--overlap-cpu-optimizer-d2h-h2d",
            "copy offloaded gradients and weights in slices, while the host updates others",
        ),
    )

    def __post_init__(self) -> None:
        if not 0.0 < self.optimizer_offload_fraction <= 1.0:
            raise OptimError(
                "{optimizer_offload_fraction:name} must be above 0 and at most 1, got "
                "{optimizer_offload_fraction:repr}",
                vars(self),
            )
        if self.optimizer_cpu_offload:
            return
        for name in ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"):
            if getattr(self, name) != getattr(type(self), name):
                raise OptimError(
                    f"{{{name}}} has no effect without {{optimizer_cpu_offload:name}}; give both "
                    "or leave it out",
                    vars(self),
                )

    @property
    def fraction(self) -> float:
        """The largest share of the elements whose state is on the host."""
        return self.optimizer_offload_fraction if self.optimizer_cpu_offload else 0.0

    def choose(self, sizes: Mapping[str, int]) -> frozenset[str]:
        """Returns the tensors whose state is on the host, the largest that fit into the fraction.

        Args:
            sizes: The elements of the tensors that a rank updates, by name.
        """
        room = int(self.fraction * sum(sizes.values()))
        chosen = set[str]()
        for name, size in sorted(sizes.items(), key=lambda pair: (-pair[1], pair[0])):
            if self.optimizer_cpu_offload and size <= room:
                chosen.add(name)
                room -= size
        return frozenset(chosen)

    def check(self, config: OptimizerConfig, formats: StateFormatConfig, device: str) -> None:
        """Refuses to offload where it has no effect or does not work.

        Args:
            config: The settings of the update rule.
            formats: The formats of state and main parameters.
            device: The type of the device that trains.

        Raises:
            OptimError: The device is a CPU, the rule does not update each element by itself, or
                there are no main parameters.
        """
        if not self.optimizer_cpu_offload:
            return
        rule = build_rules(config)[0]
        wrong = ""
        if device == "cpu":
            wrong = "has no effect: the device is a CPU, whose memory has the state already; "
        elif rule.needs != "elements":
            wrong = (
                f"does not work with the update rule {config.optimizer}, which needs {rule.needs} "
                "over several tensors of a device; use adam, lion or sgd, or "
            )
        elif formats.main_params_dtype != "fp32":
            wrong = (
                f"does not work with main weights in {formats.main_params_dtype}, which are the "
                "weights on the device; use fp32 main weights, or "
            )
        if wrong:
            raise OptimError(f"{{optimizer_cpu_offload:name}} {wrong}leave it out", vars(self))
