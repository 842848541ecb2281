"""Settings that have no effect in a run, which are accepted with a line."""

from megatron_train.config.run import RunConfig
from megatron_train.config.values import Values


def settings_without_effect(config: RunConfig, values: Values) -> list[str]:
    """Returns a line for each given setting that changes nothing in this run.

    Args:
        config: the run.
        values: the values that it was made from.
    """
    lines = []
    if values.get("placement.sequence_parallel") and config.layout.tp == 1:
        lines.append(
            "--sequence-parallel has no effect with --tensor-model-parallel-size 1, where no "
            "activations are cut"
        )
    order = config.data.sample_order
    if config.data.data_cache_path and order != "compat":
        lines.append(
            f"--data-cache-path has no effect with --sample-order {order}, which has no index to "
            "keep"
        )
    family = values.get("checkpoint.model_family")
    if family is not None and config.checkpoint.model_family is None:
        from megatron_ckpt import find_family

        lines.append(
            f"the recipe's model_family {family} has no effect, as such a model has "
            f"{'; '.join(find_family(family).differences(config.model))}"
        )
    return lines
