"""Number formats of optimizer state, with Megatron-LM's names. This module does not import torch.

State in another format than that of the update is converted when it is used
(`megatron_optim.stored`), so that the update is the same.
"""

from dataclasses import dataclass, field
from typing import Literal

from megatron_optim.errors import OptimError
from megatron_optim.fields import flag

StateFormat = Literal["fp32", "bf16", "fp16", "fp8"]
STATE_FORMATS: tuple[StateFormat, ...] = ("fp32", "bf16", "fp16", "fp8")
MainFormat = Literal["fp32", "bf16"]
MAIN_FORMATS: tuple[MainFormat, ...] = ("fp32", "bf16")

BLOCK = 2048
"""Elements that share an exponent, in fp16 and fp8."""

PRECISION_BITS = {"fp32": 24, "bf16": 8, "fp16": 11, "fp8": 4}
"""Bits of the significand of each format, with the hidden bit. fp8 is E4M3."""


@dataclass(frozen=True)
class StateFormatConfig:
    """How optimizer state and main parameters are stored. The update is always in fp32 or float64.

    Raises:
        OptimError: A format is given without ``use_precision_aware_optimizer``.
    """

    use_precision_aware_optimizer: bool = field(
        default=False,
        metadata=flag(
            "--use-precision-aware-optimizer",
            "store optimizer state in the formats of --exp-avg-dtype and others; fp32 main weights "
            "of bf16 weights then store only the 16 bits that those lack",
        ),
    )
    exp_avg_dtype: StateFormat = field(
        default="fp32",
        metadata=flag(
            "--exp-avg-dtype", "format of the running mean of the gradient", choices=STATE_FORMATS
        ),
    )
    exp_avg_sq_dtype: StateFormat = field(
        default="fp32",
        metadata=flag(
            "--exp-avg-sq-dtype",
            "format of the running mean of the squared gradient",
            choices=STATE_FORMATS,
        ),
    )
    main_params_dtype: MainFormat = field(
        default="fp32",
        metadata=flag(
            "--main-params-dtype",
            "format of main weights of bf16 weights; bf16 means none: weights are updated "
            "themselves, with stochastic rounding",
            choices=MAIN_FORMATS,
        ),
    )

    def __post_init__(self) -> None:
        if self.use_precision_aware_optimizer:
            return
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"):
            if getattr(self, name) != "fp32":
                raise OptimError(
                    f"{{{name}}} needs {{use_precision_aware_optimizer:name}}; give both or leave "
                    "it out",
                    vars(self),
                )

    def format_of(self, state: str) -> StateFormat:
        """Returns the format of a state tensor by its name, such as ``exp_avg``."""
        formats: dict[str, StateFormat] = {
            "exp_avg": self.exp_avg_dtype,
            "exp_avg_sq": self.exp_avg_sq_dtype,
        }
        return formats.get(state, "fp32")

    def main_bytes(self, precision: str) -> int:
        """Returns the bytes of the main parameter of a parameter of a dtype.

        Args:
            precision: The name of the dtype in torch.
        """
        if precision not in ("bfloat16", "float16"):
            return 0
        if precision == "float16" or not self.use_precision_aware_optimizer:
            return 4
        return 2 if self.main_params_dtype == "fp32" else 0

    def require_main_format(self, precision: str) -> None:
        """Refuses a format of main parameters that does not fit parameters of a dtype.

        Args:
            precision: The name of the dtype in torch, such as ``bfloat16``.

        Raises:
            OptimError: Only bf16 parameters have main parameters in another format.
        """
        if self.main_params_dtype != "fp32" and precision != "bfloat16":
            raise OptimError(
                f"{{main_params_dtype}} is for weights in bfloat16, but they are in {precision}; "
                "use bf16 weights or leave it out",
                vars(self),
            )


def bytes_of(format_name: StateFormat) -> float:
    """Returns the bytes of an element of state in a format, with its share of exponents."""
    if format_name == "fp32":
        return 4.0
    if format_name == "bf16":
        return 2.0
    return (2.0 if format_name == "fp16" else 1.0) + 1.0 / BLOCK
