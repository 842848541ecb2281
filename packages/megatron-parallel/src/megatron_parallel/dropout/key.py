"""Keys of dropout: hashes of the tokens of a micro-batch, and the numbers of a site of a layer."""

from dataclasses import dataclass
from typing import Final, NamedTuple, cast

import torch
from jaxtyping import Int, Int32, Int64
from torch import Tensor

from megatron_parallel.dropout.hash import WORD, bits, bits_of, low, signed
from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.axes import Axis

_START: Final = (0x243F6A88, 0x85A308D3)  # first digits of pi
_SITES: Final = (0x13198A2E, 0x03707344)  # the next ones


@dataclass(frozen=True, eq=False)
class DropoutKey:
    """Hashes of the samples and positions of a micro-batch, two words for each token.

    Built by `for_batch`, once per micro-batch and outside compiled code. Takes 8 bytes per token.

    Attributes:
        word0: `[s, b]`, int32.
        word1: `[s, b]`, int32.
    """

    word0: Int32[Tensor, "s b"]
    word1: Int32[Tensor, "s b"]

    @classmethod
    def for_batch(
        cls,
        *,
        seed: int,
        iteration: int,
        samples: Int[Tensor, " b"],
        positions: int | Int[Tensor, " s"],
    ) -> "DropoutKey":
        """Returns the key of one micro-batch.

        Args:
            seed: Seed of the run, of which the lowest 64 bits are used.
            iteration: Index of the step, of which the lowest 64 bits are used.
            samples: Index of each sample, for example in the global batch. Must be the same for
                every layout.
            positions: Index of each token in its sequence, not in its document. A number `s` means
                `0 ... s - 1`.
        """
        if isinstance(positions, int):
            positions = torch.arange(positions, device=samples.device)
        return cls.for_tokens(seed, iteration, samples[None], positions[:, None])

    @classmethod
    def for_tokens(
        cls,
        seed: int,
        iteration: int,
        samples: Int[Tensor, "#s #b"],
        positions: Int[Tensor, "#s #b"],
    ) -> "DropoutKey":
        """Returns the key of tokens that may come from any samples. See `for_batch`."""
        words = _START
        for number in (seed, seed >> 32, iteration, iteration >> 32):
            words = bits_of(number, *words), bits_of(~number, words[1], words[0])
        key0: int | Tensor = signed(words[0])
        key1: int | Tensor = signed(words[1])
        for word in (low(samples), low(samples >> 32), low(positions)):
            key0, key1 = bits(word, key0, key1), bits(~word, key1, key0)
        return cls(cast(Tensor, key0), cast(Tensor, key1))

    @staticmethod
    def site_numbers(p: float, *, layer: int, site: int) -> tuple[int, int, int, float]:
        """Returns what a kernel needs, beside a key, to compute the mask of `keyed_dropout`.

        An element is dropped if the hash of its channel under `(word0 + first, word1 ^ second)` is
        less than the third number; others are multiplied by the fourth.

        Args:
            p: Probability of dropping an element.
            layer: Global index of the layer.
            site: Index of the call of `keyed_dropout` in the layer.
        """
        numbers = DropoutSite.of(p, layer, site)
        return numbers.word0, numbers.word1, numbers.least, numbers.scale

    def of_site(
        self, p: float, *, layer: int | Int64[Tensor, ""], site: int
    ) -> tuple["DropoutKey", tuple[int, int, int, float]]:
        """Returns a key and the `site_numbers` that belong to it, for any number of the layer.

        If `layer` is a tensor, the key contains it and the numbers do not depend on it, so that
        compiled code is the same for all layers. Otherwise the key is this one.

        Args:
            p: As in `site_numbers`.
            layer: Global index of the layer.
            site: As in `site_numbers`.
        """
        numbers, key = DropoutSite.of(p, layer, site), self
        if isinstance(layer, Tensor):
            key = DropoutKey(*numbers.applied_to(self.word0, self.word1))
            numbers = numbers._replace(word0=0, word1=0)
        return key, (numbers.word0, numbers.word1, numbers.least, numbers.scale)

    def shard(self, axis: Axis) -> "DropoutKey":
        """Returns the key of this rank's part of the sequence under sequence parallelism.

        Raises:
            LayoutError: The axis size does not divide the length of the sequence.
        """
        length = self.word0.shape[0]
        if length % axis.size:
            raise LayoutError(
                f"a sequence of {length} cannot be cut into {axis.size} equal parts "
                f"over axis {axis.name!r}"
            )
        start = length // axis.size * axis.index
        return self.narrow(start, start + length // axis.size)

    def select(self, indices: Int[Tensor, "#b part"]) -> "DropoutKey":
        """Returns the key of the tokens at `indices`, for context parallelism."""
        rows = indices.t().expand(-1, self.word0.shape[1])
        return DropoutKey(self.word0.gather(0, rows), self.word1.gather(0, rows))

    def narrow(self, start: int, stop: int) -> "DropoutKey":
        """Returns the key of the tokens with index `start <= i < stop` in the sequence."""
        return DropoutKey(self.word0[start:stop], self.word1[start:stop])


class DropoutSite(NamedTuple):
    """What the calls of one site of one layer have in common, as numbers for a kernel."""

    word0: int  # added to the first word of the key
    word1: int  # combined with the second one by exclusive or
    least: int  # smallest hash that keeps an element
    scale: float

    @classmethod
    def of(cls, p: float, layer: int | Tensor, site: int) -> "DropoutSite":
        """Returns the numbers; elements are dropped with probability `p`."""
        return cls(
            signed(bits_of(layer, _SITES[0], site)),
            signed(bits_of(site, _SITES[1], layer)),
            round(p * WORD) - WORD // 2,  # words are signed; the smallest is -2^31
            1.0 / (1.0 - p),
        )

    def applied_to(
        self, word0: Int32[Tensor, "*tokens"], word1: Int32[Tensor, "*tokens"]
    ) -> tuple[Int32[Tensor, "*tokens"], Int32[Tensor, "*tokens"]]:
        """Returns words of a key that count the words of the site.

        If the layer is a tensor, so are the words, and compiled code is the same for all layers.
        """
        first, second = (torch.as_tensor(word).to(torch.int32) for word in self[:2])
        return word0 + first, word1 ^ second
