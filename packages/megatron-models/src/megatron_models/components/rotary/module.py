"""Tables of the cosines and sines of rotary angles (Su et al., 2021)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from megatron_kernels import RopeScaling, rope_frequencies, rope_tables
from torch import Tensor, nn

from megatron_models.components.rotary.spec import RotarySpec
from megatron_models.placement import Placement

Angles = tuple[Tensor, Tensor]
"""Cosines and sines, ``[s, 1, r/2]`` or, if they differ between sequences, ``[s, b, r/2]``."""


class RotaryTable(nn.Module):
    """Looks up the cosines and sines of positions. It has no parameters and no stored state.

    The table is float64 for a float64 model and float32 otherwise. If the rule of scaling depends
    on the length of a sequence, the table is that of the longest sequences, and the angles of
    others are computed in each pass.

    Args:
        rotation: The rotation.
        positions: Number of positions.
        placement: Dtype and device.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, rotation: RotarySpec, positions: int, placement: Placement) -> None:
        super().__init__()
        self.rotation, self.positions = rotation, positions
        self.scaling = rotation.scaling_at(positions)
        table = torch.float64 if placement.dtype == torch.float64 else torch.float32
        for name in ("cos", "sin"):
            shape = (positions, 1, rotation.channels // 2)
            empty = torch.empty(shape, dtype=table, device=placement.resolved_device)
            self.register_buffer(name, empty, persistent=False)
        self.reset()

    def reset(self) -> None:
        """Computes the table on its device. Does nothing on the meta device."""
        if self.cos.is_meta:
            return
        cos, sin = self._compute(torch.arange(self.positions), self.scaling)
        self.cos.copy_(cos)
        self.sin.copy_(sin)

    def forward(
        self,
        length: int,
        offset: int,
        positions: Int[Tensor, "*axes b s"] | None,
        context: int | None = None,
    ) -> Angles:
        """Returns the angles of ``positions``.

        Args:
            length: Number of tokens.
            offset: Position of the first token without ``positions``.
            positions: The positions ``[b, s]``, or ``[3, b, s]`` if the rotation has axes. Defaults
                to ``offset`` and the following ones. One position stands for equal ones on all
                axes.
            context: Length of the whole sequence, by which a rule of scaling may choose. Defaults
                to the number of positions of the model.
        """
        scaling = self.rotation.scaling_at(self.positions if context is None else context)
        if positions is not None and positions.ndim == 3:
            angles = [self._angles(axis, scaling) for axis in positions]
            cos, sin = (self._by_axis(parts) for parts in zip(*angles, strict=True))
            return cos, sin
        if positions is None and scaling == self.scaling:
            return self.cos[offset : offset + length], self.sin[offset : offset + length]
        if positions is None:
            positions = torch.arange(offset, offset + length, device=self.cos.device)
        return self._angles(positions, scaling)

    def _angles(self, positions: Int[Tensor, "*b s"], scaling: RopeScaling | None) -> Angles:
        """Returns the angles of positions on one axis, from the table if it has the scaling."""
        if scaling != self.scaling:
            return self._compute(positions, scaling)
        index = positions.t()
        return self.cos[index, 0], self.sin[index, 0]

    def _by_axis(self, tables: Sequence[Float[Tensor, "s b half"]]) -> Float[Tensor, "s b half"]:
        """Returns for each pair of channels the column of its axis."""
        columns = [tables[axis][..., pair] for pair, axis in enumerate(self.rotation.axes)]
        return torch.stack(columns, -1)

    def _compute(self, positions: Int[Tensor, "..."], scaling: RopeScaling | None) -> Angles:
        """Returns the angles of positions under a rule."""
        rotation, device = self.rotation, positions.device
        frequencies = rope_frequencies(
            rotation.channels, rotation.base, scaling=scaling, device=device
        )
        return rope_tables(positions, frequencies, self.cos.dtype, scaling)


class RotaryTables(nn.Module):
    """The tables of all rotations of a stage, often one or none.

    Args:
        rotations: The rotations, each once.
        positions: Number of positions.
        placement: Dtype and device.
    """

    def __init__(
        self, rotations: Sequence[RotarySpec], positions: int, placement: Placement
    ) -> None:
        super().__init__()
        self.rotations = tuple(rotations)
        self.tables = nn.ModuleList(
            RotaryTable(rotation, positions, placement) for rotation in rotations
        )

    def reset(self) -> None:
        """Computes all tables on their device. Does nothing on the meta device."""
        for table in self.tables:
            table.reset()  # type: ignore[operator]

    def forward(
        self,
        length: int,
        offset: int,
        positions: Int[Tensor, "*axes b s"] | None,
        context: int | None = None,
    ) -> dict[RotarySpec, Angles]:
        """Returns the angles by rotation, for the arguments of `RotaryTable`."""
        tables = zip(self.rotations, self.tables, strict=True)
        return {rotation: table(length, offset, positions, context) for rotation, table in tables}
