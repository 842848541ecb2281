"""Settings of Muon, with the names of Megatron-LM. This module does not import torch."""

from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from megatron_optim.errors import OptimError
from megatron_optim.fields import flag

ScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling", "match_rms_adamw"]
SCALE_MODES: tuple[str, ...] = get_args(ScaleMode)
CoefficientType = Literal["simple", "quintic", "polar_express", "cans"]
COEFFICIENT_TYPES: tuple[str, ...] = get_args(CoefficientType)
TensorParallelMode = Literal["blockwise", "duplicated", "distributed"]
Precision = Literal["highest", "medium"]
Coefficients = tuple[float, float, float]

_JORDAN: Final = (3.4445, -4.7750, 2.0315)
_QUINTIC: Final = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
_POLAR_EXPRESS: Final = (
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    (1.8750, -1.2500, 0.3750),
)
_CANS: Final = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)
_CYCLES: Final = {"simple": (_JORDAN,), "quintic": _QUINTIC}
"""Coefficients that are repeated from the first to the last."""
_CONVERGENT: Final = {"polar_express": _POLAR_EXPRESS, "cans": _CANS}
"""Coefficients of which the last are repeated."""


@dataclass(frozen=True)
class MuonSettings:
    """Settings of `megatron_optim.muon.Muon`."""

    momentum: float = field(
        default=0.95,
        metadata=flag("--muon-momentum", "decay rate of the running mean of the gradient"),
    )
    nesterov: bool = field(
        default=False,
        metadata=flag(
            "--muon-nesterov", "orthogonalize the mean of gradient and running mean (Nesterov)"
        ),
    )
    num_ns_steps: int = field(
        default=5, metadata=flag("--muon-num-ns-steps", "number of Newton-Schulz iterations")
    )
    coefficient_type: CoefficientType = field(
        default="quintic",
        metadata=flag(
            "--muon-coefficient-type",
            "coefficients of the iterations: simple repeats the same three",
            choices=COEFFICIENT_TYPES,
        ),
    )
    scale_mode: ScaleMode = field(
        default="spectral",
        metadata=flag(
            "--muon-scale-mode",
            "factor of the update by the sizes of the matrix; match_rms_adamw: that of AdamW",
            choices=SCALE_MODES,
        ),
    )
    extra_scale_factor: float = field(
        default=1.0,
        metadata=flag("--muon-extra-scale-factor", "another factor of the update"),
    )
    split_qkv: bool = field(
        default=True,
        metadata=flag(
            "--muon-no-split-qkv", "queries, keys and values (fused rows) as separate matrices"
        ),
    )
    tp_mode: TensorParallelMode = field(
        default="distributed",
        metadata=flag(
            "--muon-tp-mode",
            "whole matrices, each on one rank or on all (duplicated); blockwise: shards",
            choices=get_args(TensorParallelMode),
        ),
    )
    fp32_matmul_prec: Precision | None = field(
        default=None,
        metadata=flag(
            "--muon-fp32-matmul-prec",
            "precision of the iterations: highest (fp32), medium (bf16); unset: of the model",
            choices=get_args(Precision),
        ),
    )
    scalar_optimizer: str = field(
        default="adam",
        metadata=flag("--muon-scalar-optimizer", "update rule of all other parameters"),
    )

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise OptimError("{momentum:name} must lie in [0, 1), got {momentum:repr}", vars(self))
        if not self.extra_scale_factor > 0.0:
            raise OptimError(
                "{extra_scale_factor:name} must be positive, got {extra_scale_factor:repr}",
                vars(self),
            )
        if self.num_ns_steps < 1:
            raise OptimError(
                "{num_ns_steps:name} must be at least 1, got {num_ns_steps:repr}",
                vars(self),
            )
        cycle = len(_CYCLES.get(self.coefficient_type, (_JORDAN,)))
        if self.num_ns_steps % cycle:
            raise OptimError(
                f"{self.coefficient_type} has coefficients for {cycle} steps, which "
                "{num_ns_steps} is not a multiple of; use "
                f"{-(-self.num_ns_steps // cycle) * cycle}",
                vars(self),
            )

    def coefficients(self) -> tuple[Coefficients, ...]:
        """Returns ``(a, b, c)`` of each iteration ``a X + b X X^T X + c (X X^T)^2 X``.

        ``simple``: Jordan et al. 2024, "Muon". ``quintic``: other coefficients for each of five
        iterations, as in Megatron-LM, repeated. ``polar_express``: Amsel et al. 2025, "The Polar
        Express", whose last coefficients are repeated. ``cans``: Grishina et al. 2025,
        "Accelerating Newton-Schulz Iteration for Orthogonalization via Chebyshev-type
        Polynomials", likewise.
        """
        steps, kind = self.num_ns_steps, self.coefficient_type
        if kind in _CYCLES:
            return _CYCLES[kind] * (steps // len(_CYCLES[kind]))
        given = _CONVERGENT[kind]
        return (*given, *(given[-1:] * steps))[:steps]

    def scale(self, rows: int, columns: int) -> float:
        """Returns the factor of an orthogonal update of a matrix.

        ``spectral``: ``sqrt(max(rows, columns))``, so that the root mean square of the update is
        1. ``match_rms_adamw``: 0.2 times that, the usual root mean square of AdamW's updates (Liu
        et al. 2025, "Muon is Scalable for LLM Training"). ``shape_scaling``: ``sqrt(max(1, rows /
        columns))`` (Jordan et al. 2024). ``unit_rms_norm``: ``sqrt(rows / columns)`` (Bernstein
        and Newhouse 2024).
        """
        factor = {
            "spectral": max(rows, columns),
            "match_rms_adamw": 0.2**2 * max(rows, columns),
            "shape_scaling": max(1.0, rows / columns),
            "unit_rms_norm": rows / columns,
        }[self.scale_mode]
        return float(factor**0.5 * self.extra_scale_factor)
