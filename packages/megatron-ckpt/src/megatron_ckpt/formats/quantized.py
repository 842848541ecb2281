"""Quantized weights of Hugging Face folders, shown as the tensors that they stand for.

`quantization_config` in ``config.json`` names the method. Two methods are read: ``fp8`` with blocks
of weights that share a scale (DeepSeek-V3, ``weight_block_size``; the scales are float32 or, with
``scale_fmt`` ``ue8m0``, powers of two in float8_e8m0fnu) and ``mxfp4`` (gpt-oss, the OCP
Microscaling Formats specification 1.0). Both are read only: an export is not quantized.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megatron_ckpt.errors import CheckpointError, shorten
from megatron_ckpt.formats.source import TensorSource
from megatron_ckpt.views import Box

if TYPE_CHECKING:
    import torch
    from torch import Tensor

QUANTIZATION = "quantization_config"
Shape = tuple[int, ...]
ReadPart = Callable[[int, Box], "Tensor"]
"""Returns a box of the stored tensor with the given index."""


class Scheme(Protocol):
    """How one tensor is stored as several."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Ends of the names of the stored tensors, after the name of the tensor."""

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        """Returns the shape of the tensor. Raises ValueError if the stored shapes do not fit."""

    def read_box(self, box: Box, shapes: Sequence[Shape], get: ReadPart) -> "Tensor":
        """Returns a box of the tensor in float32."""


@dataclass(frozen=True)
class BlockFp8:
    """A matrix in float8 ``[m, n]`` and a scale for each block of ``rows x columns`` elements."""

    rows: int
    columns: int
    suffixes: tuple[str, ...] = ("", "_scale_inv")

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        """Returns the shape of the matrix."""
        matrix, scales = shapes
        if len(matrix) != 2:
            raise ValueError(f"the shape is {matrix}, not that of a matrix")
        wanted = (-(-matrix[0] // self.rows), -(-matrix[1] // self.columns))
        if scales != wanted:
            raise ValueError(f"its scales have shape {scales}, expected {wanted}")
        return matrix

    def read_box(self, box: Box, shapes: Sequence[Shape], get: ReadPart) -> "Tensor":
        """Reads the box and the scales of its blocks."""
        from megatron_ckpt.ops.arithmetic import BlockScale

        def part(index: int, wanted: Box) -> "Tensor":
            return get(index, wanted).float()

        return BlockScale(self.rows, self.columns).read_box(0, box, shapes, part)


#: Values of the four bits of E2M1: sign, two bits of exponent, one of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCK = 32  # elements with a common scale


@dataclass(frozen=True)
class Mxfp4:
    """Matrices of experts ``[experts, in, out]``, stored with rows ``out`` in blocks of ``in``.

    Stored are ``_blocks [experts, out, in / 32, 16]``, bytes of two elements with the first in the
    low bits, and ``_scales [experts, out, in / 32]``, exponents of 2 plus 127 (E8M0). They may have
    the dtypes ``U8`` or ``F4`` and ``F8_E8M0``.
    """

    suffixes: tuple[str, ...] = ("_blocks", "_scales")

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        """Returns the shape of the matrices."""
        blocks, scales = shapes
        if len(blocks) != 4 or blocks[3] * 2 != _BLOCK or scales != blocks[:3]:
            raise ValueError(
                f"its blocks and scales have shapes {blocks} and {scales}, expected [e, n, k, "
                f"{_BLOCK // 2}] and [e, n, k]"
            )
        return blocks[0], blocks[2] * _BLOCK, blocks[1]

    def read_box(self, box: Box, shapes: Sequence[Shape], get: ReadPart) -> "Tensor":
        """Reads the blocks that the box overlaps."""
        import torch

        (expert, start, row), (experts, width, rows) = box.offsets, box.lengths
        first, last = start // _BLOCK, -(-(start + width) // _BLOCK)
        inside = ((expert, row, first), (experts, rows, last - first))
        packed = get(0, Box((*inside[0], 0), (*inside[1], _BLOCK // 2)))
        scales = get(1, Box(*inside)).view(torch.float8_e8m0fnu).float()
        table = torch.tensor((*_E2M1, *(-value for value in _E2M1)))
        halves = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
        values = (table[halves.long()] * scales.unsqueeze(-1)).flatten(-2)
        return values.narrow(2, start - first * _BLOCK, width).transpose(1, 2)


def find_scheme(config: Mapping[str, Any], where: str) -> Scheme | None:
    """Returns how the weights are quantized; None if they are not, or in an unknown way.

    A family refuses an unknown `quantization_config`, as it does any field it does not know.

    Raises:
        CheckpointError: The size of blocks is not two positive integers.
    """
    given = config.get(QUANTIZATION)
    if not isinstance(given, Mapping):
        return None
    if given.get("quant_method") == "mxfp4":
        return Mxfp4()
    size = given.get("weight_block_size")
    if given.get("quant_method") != "fp8" or size is None:
        return None
    if (
        not isinstance(size, list)
        or len(size) != 2
        or any(type(n) is not int or n < 1 for n in size)
    ):
        raise CheckpointError(
            f"{where}: {QUANTIZATION} has weight_block_size = {shorten(repr(size))}; give two "
            "positive integers, such as [128, 128]"
        )
    return BlockFp8(*size)


def without_quantization(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Returns the settings in a ``config.json`` that describe the model, without its quantization.

    A quantization of an unknown kind remains, so that a family refuses it.

    Args:
        config: Content of the file.
        where: The file, for errors.

    Raises:
        CheckpointError: The size of blocks is not two positive integers.
    """
    if find_scheme(config, where) is None:
        return config
    return {name: value for name, value in config.items() if name != QUANTIZATION}


class QuantizedTensors(Mapping[str, "Tensor"]):
    """The tensors of a folder, with each quantized one in place of those that it is stored as.

    A quantized tensor is read in float32, which holds its values exactly or rounded once. `meta`
    gives the dtype that it has where no other is asked for.

    Args:
        tensors: The stored tensors.
        scheme: How tensors are quantized.
        dtype: Dtype of the tensors that the quantized ones stand for.

    Raises:
        CheckpointError: A part of a tensor is missing, or shapes do not fit.
    """

    def __init__(self, tensors: TensorSource, scheme: Scheme, dtype: "torch.dtype") -> None:
        self._tensors, self._scheme, self._dtype = tensors, scheme, dtype
        stored = tensors.meta()
        self._shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
        mark = scheme.suffixes[-1]
        names = [name.removesuffix(mark) for name in stored if name.endswith(mark)]
        self._parts = {n: tuple(n + suffix for suffix in scheme.suffixes) for n in names}
        for name, parts in self._parts.items():
            for part in parts:
                if part not in stored:
                    raise CheckpointError(f"tensor {name!r} is quantized, but {part!r} is missing")
        inner = {part for parts in self._parts.values() for part in parts}
        plain = {name: tensor for name, tensor in stored.items() if name not in inner}
        self._meta = plain | {name: self._empty(name) for name in self._parts}
        self._check_plain(plain)

    def __getitem__(self, name: str) -> "Tensor":
        if name not in self._parts:
            return self._tensors[name]
        shape = tuple(self._meta[name].shape)
        return self.box(name, Box((0,) * len(shape), shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self._meta)

    def __len__(self) -> int:
        return len(self._meta)

    def meta(self) -> dict[str, "Tensor"]:
        """Returns the tensors on the meta device: shapes and dtypes without content."""
        return dict(self._meta)

    def box(self, name: str, box: Box) -> "Tensor":
        """Reads a box of a tensor and only the scales that it needs."""
        if name not in self._parts:
            return self._tensors.box(name, box)
        parts = self._parts[name]

        def get(index: int, part: Box) -> "Tensor":
            return self._tensors.box(parts[index], part)

        shapes = [self._shapes[part] for part in parts]
        return self._scheme.read_box(box, shapes, get)

    def _empty(self, name: str) -> "Tensor":
        import torch

        try:
            shape = self._scheme.shape([self._shapes[part] for part in self._parts[name]])
        except ValueError as error:
            raise CheckpointError(f"tensor {name!r} is quantized, but {error}") from None
        return torch.empty(shape, dtype=self._dtype, device="meta")

    def _check_plain(self, plain: Mapping[str, "Tensor"]) -> None:
        for name, tensor in plain.items():
            if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
                raise CheckpointError(
                    f"tensor {name!r} is in {str(tensor.dtype).removeprefix('torch.')} and has no "
                    f"{name + self._scheme.suffixes[-1]!r}; quantized tensors need their scales"
                )
