"""The entry of BERT in the group ``megatron.models``."""

from megatron_models.kinds import ModelKind
from megatron_models.models.bert.config import BertConfig

KIND = ModelKind(
    name="bert",
    config=BertConfig,
    stages="megatron_models.models.bert.model:bert_chunks",
    default_task="bert",
    summary="an encoder that reads in both directions",
)
