"""What a model and prompts have to be like for decoding."""

from collections.abc import Sequence

from megatron_models import CausalModel

from megatron_infer.errors import InferError


def check_model(model: CausalModel) -> None:
    """Raise InferError if the model cannot decode as it is cut."""
    if model.mesh.layout.vpp > 1:
        raise InferError(
            f"the model has vpp={model.mesh.layout.vpp} stages on each rank; save it and load it "
            "into a mesh with vpp=1 to generate"
        )
    if model.sequence_parallel:
        raise InferError(
            "the model cuts sequences over tensor-parallel ranks, which a single new token cannot "
            "be; build it with sequence_parallel=False to generate: its weights are the same"
        )


def check_prompt(model: CausalModel, index: int, prompt: Sequence[int], *, new_tokens: int) -> None:
    """Raise InferError if a prompt, number ``index`` of a call, cannot be continued.

    ``new_tokens`` is how many tokens there has to be room for.
    """
    config = model.config
    if not prompt:
        raise InferError(f"prompt {index + 1} is empty: there is nothing to continue")
    if len(prompt) + new_tokens > config.max_position_embeddings:
        left = ", so none is left for a new token" if new_tokens else ""
        raise InferError(
            f"prompt {index + 1} has {len(prompt)} tokens and the model "
            f"{config.max_position_embeddings} positions{left}; shorten the prompt"
        )
    if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
        raise InferError(
            f"prompt {index + 1} has token {max(prompt)}, the model's vocabulary "
            f"{config.vocab_size} tokens; is it another model's tokenizer?"
        )
