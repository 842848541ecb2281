"""Encoders: outputs of tokens that are no padding, and of whole sequences, if there are any."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron_kernels import Mask
from torch import Tensor
from torch.nn import functional

from families.comparison import Comparison, Inputs, loaded, text

if TYPE_CHECKING:
    from families.case import FamilyCase

_OF_TOKENS = ("prediction_logits", "last_hidden_state")
_OF_SEQUENCES = ("seq_relationship_logits", "pooler_output")


class Encoder(Comparison):
    """Encoders with any heads, on texts with padding and two token types."""

    def inputs(self, theirs: Any, batch: int = 3, length: int = 32) -> Inputs:
        """Returns tokens, types, numbers of documents and weights of the outputs in a loss.

        No token is the one for padding: RoBERTa gives it another position.
        """
        config = theirs.config
        tokens = _without_padding(text(config.vocab_size, batch, length), config)
        types = torch.arange(length).expand(batch, -1) * config.type_vocab_size // length
        ends = length - 5 * torch.arange(batch)[:, None] % (length // 2)
        return {"tokens": tokens, "types": types, "mask": torch.arange(length) < ends}

    def limited(self, inputs: Inputs, config: Any) -> Inputs:
        """Returns the inputs for another vocabulary and token for padding."""
        tokens = inputs["tokens"] % config.vocab_size
        return {**inputs, "tokens": _without_padding(tokens, config)}

    def ours(self, model: Any, inputs: Inputs) -> tuple[Tensor, ...]:
        """Returns outputs of tokens ``[rows, n]`` and of sequences ``[b, n]``."""
        with torch.no_grad():
            return self._ours(model, inputs)

    def theirs(self, model: Any, inputs: Inputs) -> tuple[Tensor, ...]:
        """Returns outputs of tokens ``[rows, n]`` and of sequences ``[b, n]``."""
        with torch.no_grad():
            return self._theirs(model, inputs)

    def our_loss(self, model: Any, inputs: Inputs) -> Tensor:
        """Returns a sum of outputs of all heads."""
        return _loss(self._ours(model, inputs))

    def their_loss(self, model: Any, inputs: Inputs) -> Tensor:
        """Returns a sum of outputs of all heads."""
        return _loss(self._theirs(model, inputs))

    def load(self, case: "FamilyCase", folder: Path) -> Any:
        """Returns the model that transformers' class loads."""
        return loaded(case, folder, case.model_class)

    def _ours(self, model: Any, inputs: Inputs) -> tuple[Tensor, ...]:
        mask = Mask(causal=False, document_ids=inputs["mask"].int() - 1)
        found = model(inputs["tokens"], token_types=inputs["types"], mask=mask)
        config, outputs = model.config, []
        if config.predicts_tokens or (config.task_head == "none" and not config.has_binary_head):
            tokens = found.tokens
            tokens = tokens[..., : config.vocab_size] if config.predicts_tokens else tokens
            outputs.append(tokens.transpose(0, 1)[inputs["mask"]])
        if found.sequences is not None:
            outputs.append(found.sequences)
        return tuple(outputs)

    def _theirs(self, model: Any, inputs: Inputs) -> tuple[Tensor, ...]:
        given = {
            "input_ids": inputs["tokens"],
            "token_type_ids": inputs["types"],
            "attention_mask": inputs["mask"].long(),
        }
        if type(model).__name__.endswith("MultipleChoice"):
            given = {name: value.unsqueeze(1) for name, value in given.items()}
        found = model(**given, return_dict=True)
        tokens = [found[name] for name in _OF_TOKENS if found.get(name) is not None]
        sequences = [found[name] for name in _OF_SEQUENCES if found.get(name) is not None]
        if (logits := found.get("logits")) is not None:
            (tokens if logits.ndim == 3 else sequences).append(logits)
        rows = tuple(each[inputs["mask"]] for each in tokens)
        return (*rows, *sequences)


def _without_padding(tokens: Tensor, config: Any) -> Tensor:
    """Returns tokens with another one in place of that for padding."""
    padding = config.pad_token_id
    return tokens if padding is None else tokens.where(tokens != padding, padding + 1)


def _loss(outputs: tuple[Tensor, ...]) -> Tensor:
    """Returns the sum of a cross entropy of each output, with fixed classes."""
    losses = []
    for found in outputs:
        classes = torch.arange(len(found)) * 7 % max(found.shape[1], 2)
        if found.shape[1] == 1:
            losses.append((found[:, 0] - classes).square().mean())
        else:
            losses.append(functional.cross_entropy(found, classes))
    return torch.stack(losses).sum()


ENCODER = Encoder()
