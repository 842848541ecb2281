"""Positions with a time, a height and a width of each token, for models with ``mrope``."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from megatron_parallel import to_device
from torch import Tensor

from megatron_infer.engine.stages import LocalStages
from megatron_infer.errors import InferError


class AxisPositions:
    """The positions of prompts and of the tokens that continue them.

    A new token has the same position on all axes: one more than the largest position before it, as
    in Qwen2-VL.

    Args:
        model: The model.
        prompts: The prompts.
        positions: Positions of each prompt.
        new_tokens: The largest number of tokens after each prompt.
        room: Number of positions that are left for new tokens at least.

    Attributes:
        following: For each prompt the position of the token after it.

    Raises:
        InferError: The model has no axes, or positions do not fit the prompts or the model.
    """

    def __init__(
        self,
        model: LocalStages,
        prompts: Sequence[Sequence[int]],
        positions: Sequence[Int[Tensor, "3 _"]],
        new_tokens: Sequence[int],
        room: int,
    ) -> None:
        if not model.has_position_axes:
            raise InferError("the positions of the model have no axes; leave out `positions`")
        if len(positions) != len(prompts):
            raise InferError(
                f"got {len(prompts)} prompts but positions of {len(positions)}; give them for each"
            )
        self.following = [
            _following(model, index, len(prompt), own, model.positions - room)
            for index, (prompt, own) in enumerate(zip(prompts, positions, strict=True))
        ]
        longest = max(len(prompt) + new for prompt, new in zip(prompts, new_tokens, strict=True))
        self._whole = torch.zeros(
            (3, len(prompts), longest), dtype=torch.int64, device=model.device
        )
        for row, (own, first) in enumerate(zip(positions, self.following, strict=True)):
            known = own.shape[1]
            self._whole[:, row, :known] = own
            later = torch.arange(first, first + longest - known)
            self._whole[:, row, known:] = later.clamp(max=model.positions - 1)  # of padding

    def take(
        self, rows: Sequence[int], starts: Sequence[int], width: int
    ) -> Int[Tensor, "3 rows width"]:
        """Returns the positions of ``width`` tokens of rows from the indices ``starts`` on.

        Positions after the end of a row are those of padding, and have no meaning.
        """
        device, last = self._whole.device, self._whole.shape[2] - 1
        first = to_device(torch.tensor(starts), device)[:, None]
        index = first + torch.arange(width, device=device)
        own = self._whole[:, to_device(torch.tensor(rows), device)]
        return own.gather(2, index.clamp(max=last).expand(3, -1, -1))


def _following(model: LocalStages, index: int, length: int, positions: Tensor, bound: int) -> int:
    """Returns the position after a prompt, whose positions must be below ``bound``."""
    name = f"positions of prompt {index + 1}"
    if tuple(positions.shape) != (3, length):
        raise InferError(
            f"{name} are {list(positions.shape)}, but time, height and width of its {length} "
            f"tokens are [3, {length}]"
        )
    smallest, largest = int(positions.min()), int(positions.max())
    if smallest < 0 or largest >= bound:
        raise InferError(
            f"{name} contain {smallest if smallest < 0 else largest}; the model has "
            f"{model.positions} positions, of which a prompt may have 0 to {bound - 1}"
        )
    return largest + 1
