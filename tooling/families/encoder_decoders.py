"""Encoder-decoders: logits of the decoder's tokens, for texts of two lengths with padding."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from families.comparison import Comparison, Inputs, loaded, text

if TYPE_CHECKING:
    from families.case import FamilyCase


class EncoderDecoder(Comparison):
    """Models that read a source and predict each next token of a target."""

    def inputs(self, theirs: Any, batch: int = 3, length: int = 32) -> Inputs:
        """Returns a source, which of its tokens are no padding, and a shorter target."""
        return self._inputs(theirs.config.vocab_size, batch, length)

    def _inputs(self, vocabulary: int, batch: int, length: int) -> Inputs:
        ends = length - 5 * torch.arange(batch)[:, None] % (length // 2)
        return {
            "source": text(vocabulary, batch, length),
            "mask": torch.arange(length) < ends,
            "target": text(vocabulary, batch, length - 8, seed=6),
        }

    def limited(self, inputs: Inputs, config: Any) -> Inputs:
        """Returns the inputs for a smaller vocabulary."""
        sides = {name: inputs[name] % config.vocab_size for name in ("source", "target")}
        return {**inputs, **sides}

    def ours(self, model: Any, inputs: Inputs) -> tuple[Tensor, ...]:
        """Returns the logits ``[b s, v]``."""
        with torch.no_grad():
            found = model(
                source=inputs["source"],
                target=inputs["target"],
                source_padding=~inputs["mask"],
            )
        return (found[..., : model.config.vocab_size].transpose(0, 1).flatten(0, 1),)

    def theirs(self, model: Any, inputs: Inputs) -> tuple[Tensor, ...]:
        """Returns the logits ``[b s, v]``."""
        with torch.no_grad():
            return (self._their_logits(model, inputs, inputs["target"]),)

    def our_loss(self, model: Any, inputs: Inputs) -> Tensor:
        """Returns the mean loss of every next token of the target."""
        found: Tensor = model(
            source=inputs["source"],
            target=inputs["target"][:, :-1],
            source_padding=~inputs["mask"],
            labels=inputs["target"][:, 1:],
        )
        return found.mean()

    def their_loss(self, model: Any, inputs: Inputs) -> Tensor:
        """Returns the mean loss of every next token of the target."""
        target = inputs["target"]
        found = self._their_logits(model, inputs, target[:, :-1])
        return functional.cross_entropy(found, target[:, 1:].flatten())

    @staticmethod
    def _their_logits(model: Any, inputs: Inputs, target: Tensor) -> Tensor:
        for part in (model, model.encoder, model.decoder):  # each has a copy, and needs it
            part.config.return_dict = True
        found = model(
            input_ids=inputs["source"],
            attention_mask=inputs["mask"].long(),
            decoder_input_ids=target,
            use_cache=False,
            return_dict=True,
        )
        logits: Tensor = found.logits
        return logits.flatten(0, 1)

    def load(self, case: "FamilyCase", folder: Path) -> Any:
        """Returns the model that ``AutoModelForSeq2SeqLM`` loads."""
        return loaded(case, folder, "AutoModelForSeq2SeqLM")

    def continued(self, model: Any, tokens: Tensor, cache: Any = None) -> Tensor:
        """Returns the logits of tokens of a target; the first pass with a cache reads a source."""
        inputs = self._inputs(model.config.vocab_size, len(tokens), 20)
        first = cache is None or cache.length == 0
        found: Tensor = model(
            source=inputs["source"] if first else None,
            target=tokens,
            source_padding=~inputs["mask"],
            cache=cache,
        )
        return found


ENCODER_DECODER = EncoderDecoder()
