"""How a kind of model is compared with transformers: inputs, outputs and losses of both."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from families.case import FamilyCase

Inputs = Mapping[str, Tensor]


def text(vocabulary: int, batch: int = 3, length: int = 32, *, seed: int = 5) -> Tensor:
    """Returns random tokens ``[batch, length]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (batch, length), generator=generator)


class Comparison(ABC):
    """What the proof of a family needs to know of its kind of model.

    Outputs are matrices ``[rows, n]`` in an order that both sides share. Functions of our models
    take whole models on one rank.
    """

    def inputs(self, theirs: Any, batch: int = 3, length: int = 32) -> Inputs:
        """Returns inputs for a model of theirs."""
        return {"tokens": text(theirs.config.vocab_size, batch, length)}

    def limited(self, inputs: Inputs, config: Any) -> Inputs:
        """Returns the inputs for a smaller vocabulary, with their configuration."""
        return {**inputs, "tokens": inputs["tokens"] % config.vocab_size}

    @abstractmethod
    def ours(self, model: Any, inputs: Inputs) -> tuple[Tensor, ...]:
        """Returns the outputs of our model."""

    @abstractmethod
    def theirs(self, model: Any, inputs: Inputs) -> tuple[Tensor, ...]:
        """Returns the outputs of a model of theirs."""

    @abstractmethod
    def our_loss(self, model: Any, inputs: Inputs) -> Tensor:
        """Returns a loss of our model, with gradients of all its parameters."""

    @abstractmethod
    def their_loss(self, model: Any, inputs: Inputs) -> Tensor:
        """Returns the same loss of a model of theirs."""

    @abstractmethod
    def load(self, case: "FamilyCase", folder: Path) -> Any:
        """Returns the model of theirs that transformers loads from an exported folder."""

    def continued(self, model: Any, tokens: Tensor, cache: Any = None) -> Tensor:
        """Returns the logits ``[s, b, v]`` of tokens, after those in a cache if one is given."""
        found: Tensor = model(tokens, cache=cache)
        return found


def loaded(case: "FamilyCase", folder: Path, auto_class: str) -> Any:
    """Returns the model that an Auto class of transformers loads, with the case's attention."""
    import transformers

    return getattr(transformers, auto_class).from_pretrained(
        folder, attn_implementation=case.attention, experts_implementation="eager"
    )


class Causal(Comparison):
    """Decoders: logits of every token."""

    def ours(self, model: Any, inputs: Inputs) -> tuple[Tensor, ...]:
        """Returns the logits ``[b s, v]``."""
        with torch.no_grad():
            found: Tensor = model(inputs["tokens"])[..., : model.config.vocab_size]
        return (found.transpose(0, 1).flatten(0, 1),)

    def theirs(self, model: Any, inputs: Inputs) -> tuple[Tensor, ...]:
        """Returns the logits ``[b s, v]``."""
        model.config.return_dict = True  # several classes raise an exception without it
        with torch.no_grad():
            found: Tensor = model(inputs["tokens"], use_cache=False, return_dict=True).logits
        return (found.flatten(0, 1),)

    def our_loss(self, model: Any, inputs: Inputs) -> Tensor:
        """Returns the mean loss of every next token."""
        tokens = inputs["tokens"]
        found: Tensor = model.loss(tokens[:, :-1], tokens[:, 1:]).mean()
        return found

    def their_loss(self, model: Any, inputs: Inputs) -> Tensor:
        """Returns the mean loss of every next token."""
        tokens = inputs["tokens"]
        found = model(tokens[:, :-1], use_cache=False, return_dict=True).logits
        return functional.cross_entropy(found.flatten(0, 1), tokens[:, 1:].flatten())

    def load(self, case: "FamilyCase", folder: Path) -> Any:
        """Returns the model that ``AutoModelForCausalLM`` loads."""
        return loaded(case, folder, "AutoModelForCausalLM")


CAUSAL = Causal()
