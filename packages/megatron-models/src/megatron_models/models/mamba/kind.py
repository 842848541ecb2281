"""The entry of Mamba-2 models in the group ``megatron.models``."""

from megatron_models.kinds import ModelKind
from megatron_models.models.mamba.config import MambaModelConfig

KIND = ModelKind(
    name="mamba",
    config=MambaModelConfig,
    stages="megatron_models.models.gpt.model:gpt_chunks",
    default_task="gpt",
    summary="a decoder-only language model of Mamba-2 layers",
    supports_decoding=True,
)
