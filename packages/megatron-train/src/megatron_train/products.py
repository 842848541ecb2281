"""The products of linear layers of a run, and the loss of its output layer."""

from collections.abc import Mapping

from megatron_parallel.tensor_parallel import (
    UNFUSED_CROSS_ENTROPY,
    LinearCrossEntropy,
    Product,
    VocabularyLoss,
    find_product,
)

from megatron_train.config.products import PLAIN
from megatron_train.config.run_sections import RunSections
from megatron_train.errors import TrainError


def products_of(config: RunSections) -> Mapping[str, Product]:
    """Returns the product of each role of layers. Layers of other roles are plain.

    Raises:
        TrainError: No layer of the model has the role, or the run cannot train with the product.
    """
    if config.product == PLAIN:
        return {}
    kind = find_product(config.product)
    found = kind.build(
        None if kind.section is None else config.extension_settings[kind.section.name]
    )
    roles = {spec.role for spec in config.model.parameters().values()} - {""}
    if strange := sorted(found.keys() - roles):
        raise TrainError(
            f"--linear-product {config.product} is set for {', '.join(strange)}, but a model of "
            f"kind {config.model.kind} has {', '.join(sorted(roles))}; give some of these roles"
        )
    adapts = any(product.is_adapter for product in found.values())
    if adapts and config.data_parallel.use_torch_fsdp2:
        raise TrainError(
            f"--linear-product {config.product} freezes weights, but --use-torch-fsdp2 shards "
            "frozen and trained ones together; give --use-distributed-optimizer instead"
        )
    return found


def trains_adapters_only(config: RunSections) -> bool:
    """Returns whether the run trains only parameters of products, such as adapters."""
    return any(product.is_adapter for product in products_of(config).values())


def vocabulary_loss_of(config: RunSections) -> VocabularyLoss:
    """Returns the implementation of output layer and loss."""
    fusion = config.placement.cross_entropy_fusion_impl
    if not fusion.startswith("linear"):
        return UNFUSED_CROSS_ENTROPY
    return LinearCrossEntropy(gradients="forward" if fusion == "linear" else "backward")
