"""What operations keep for the backward pass, in bytes of one element.

Importing this module does not import torch.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Keeping:
    """What operations keep, in bytes.

    Attributes:
        element: of an activation.
        mask: of an element of a dropout mask; 0 where it is a hash, computed again.
        square: of each query and key, for each head: scores, probabilities and what dropout makes
            of them; 0 for fused attention.
        pair: of each query and key, for all heads and samples: whether it may attend. Documents
            make it one for each sample, which is not counted here.
        row: of each query, for each head: the logarithm of its sum of exponentials.
        attended: of an element of queries, keys and values, where attention keeps copies in another
            precision instead of them; 0 where it keeps them as they are.
        statistic: of a number that a norm keeps for each token.
        normalised: of an element of the normalised input, where a norm keeps it too.
        norm_input: of an element of a norm's input, where it is kept in another precision.
        number: of a channel's number that hidden dropout keeps.
        key_number: of a key's number that attention dropout keeps, for each head.
    """

    element: int
    mask: int = 0
    square: int = 0
    pair: int = 0
    row: int = 4
    attended: int = 0
    statistic: int = 4
    normalised: int = 0
    norm_input: int = 0
    number: int = 0
    key_number: int = 0

    @classmethod
    def paper(cls) -> "Keeping":
        """bfloat16; of each probability itself, its mask and what dropout leaves: 2 + 1 + 2."""
        return cls(element=2, mask=1, square=5, row=0, statistic=0)

    @classmethod
    def cpu(
        cls,
        element: int,
        normalization: str,
        *,
        hidden_dropout: bool = False,
        attention_dropout: bool = False,
    ) -> "Keeping":
        """Returns what this package's operations keep on CPUs.

        Attention dropout needs attention written out, which then keeps what dropout leaves of the
        probabilities too. RMSNorm is not fused and computes in at least float32.
        """
        wide = max(element, 4)
        rms = normalization == "RMSNorm"
        keeping = cls(
            element=element,
            row=wide,
            statistic=wide if rms else element,
            normalised=wide if rms else 0,
            norm_input=wide if rms else 0,
            number=4 if hidden_dropout else 0,
            key_number=4 if attention_dropout else 0,
        )
        return keeping.written_out(wide) if attention_dropout else keeping

    def written_out(self, more: int = 0) -> "Keeping":
        """Returns the same with attention written out, if it is fused.

        It is computed in at least float32 and keeps the scores and the probabilities, for each row
        its logarithm and whether it has one, and in each layer the mask.

        Args:
            more: bytes kept of each query and key, for each head, beside scores and probabilities.
        """
        wide = max(self.element, 4)
        if self.square:
            return replace(self, square=self.square + more)
        attended = wide if self.element < wide else 0
        square = 2 * wide + more
        return replace(self, square=square, pair=1, row=wide + 1, attended=attended)
