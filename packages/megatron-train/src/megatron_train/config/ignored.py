"""Settings that have no effect in a run and are accepted with a note."""

from megatron_models import ConfigError

from megatron_train.config.kernel_backends import fusions_without_effect
from megatron_train.config.options import flags_of
from megatron_train.config.run import RunConfig
from megatron_train.config.values import Values


def settings_without_effect(config: RunConfig, values: Values) -> list[str]:
    """Returns a line for each given setting that has no effect in this run.

    Args:
        config: The run.
        values: The given values.
    """
    lines = []
    if values.get("placement.sequence_parallel") and config.layout.tp == 1:
        lines.append(
            "--sequence-parallel has no effect with --tensor-model-parallel-size 1: there are no "
            "activations to split"
        )
    order = config.data.sample_order
    if config.data.data_cache_path and order != "compat":
        lines.append(
            f"--data-cache-path has no effect with --sample-order {order}, which has no index to "
            "cache"
        )
    if values.get("data.num_workers") and config.layout.hybrid_cp:
        lines.append(
            "--num-workers has no effect with --hybrid-context-parallel, whose ranks exchange the "
            "lengths of documents when they read them"
        )
    lines += [
        f"--no-{fusion.replace('_', '-')} has no effect: no layer of this model has such operations"
        for fusion in fusions_without_effect(config)
        if values.get(f"placement.{fusion}") is False
    ]
    flags = flags_of(type(config.model))
    for name, why in config.model.unused_fields().items():
        if f"model.{name}" in values.given:
            error = ConfigError(f"{{{name}}} has no effect {why}", vars(config.model))
            lines.append(error.format_message(flags))
    family = values.get("checkpoint.model_family")
    if family is not None and config.checkpoint.model_family is None:
        from megatron_ckpt import find_family

        lines.append(
            f"the recipe's model_family {family} has no effect: models of this family have "
            f"{'; '.join(find_family(family).differences(config.model))}"
        )
    return lines
