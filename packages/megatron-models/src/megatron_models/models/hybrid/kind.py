"""The entry of hybrid models in the group ``megatron.models``."""

from megatron_models.kinds import ModelKind
from megatron_models.models.hybrid.config import HybridConfig

KIND = ModelKind(
    name="hybrid",
    config=HybridConfig,
    stages="megatron_models.models.gpt.model:gpt_chunks",
    default_task="gpt",
    summary="a decoder-only language model of recurrent and attention layers",
    supports_decoding=True,
)
