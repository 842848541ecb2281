"""The entry in the group ``megatron.models``."""

from megatron_models.kinds import ModelKind

from bidirectional.config import BidirectionalConfig

KIND = ModelKind(
    name="bidirectional",
    config=BidirectionalConfig,
    stages="bidirectional.model:stages",
    default_task="masked_lm",
    summary="an encoder that reads in both directions",
)
