"""Which parameters a model cannot take from the weights of another that has other heads."""

import dataclasses

from megatron_models.models.model_config import ModelConfig


def head_fields(config: type[ModelConfig]) -> tuple[str, ...]:
    """Returns the fields that select and shape heads, which do not affect the trunk's weights."""
    return tuple(f.name for f in dataclasses.fields(config) if f.metadata.get("head"))


def new_head_parameters(config: ModelConfig, source: ModelConfig) -> list[str]:
    """Returns the global names of the parameters of heads that keep their initial values.

    Args:
        config: The model that begins a training.
        source: The model whose weights it begins with.
    """
    theirs = source.heads()
    found = []
    for prefix, head in config.heads().items():
        shared = head.shared_parameters(theirs.get(prefix))
        found += [f"{prefix}.{name}" for name in head.parameters() if name not in shared]
    return sorted(found)
