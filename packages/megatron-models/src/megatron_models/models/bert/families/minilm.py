"""MiniLM and other sentence encoders: a BERT with a pooler, without heads (Wang et al., 2020).

`transformers` saves such an encoder as `BertModel`. `megatron_models.sentence_embeddings` maps its
output to the embeddings of sentences; the pooler is read, but they do not need it.
"""

from megatron_models.families.family import Family
from megatron_models.families.settings import Mapped
from megatron_models.models.bert.families.encoder import (
    EXPORTED,
    FORMER_ENDINGS,
    NEUTRAL,
    TRUNK_SETTINGS,
    WITHOUT_EFFECT,
    same,
    trunk_rows,
)
from megatron_models.models.bert.families.heads import Heads, heads

FAMILY = Family(
    name="minilm",
    kind="bert",
    title="MiniLM",
    architectures=("BertModel",),
    model_type="bert",
    rows=(*trunk_rows(""), *same("sequence_head.pooler", "pooler.dense")),
    settings={**TRUNK_SETTINGS, "vocab_size": Mapped("vocab_size", absent=30522)},
    custom=(heads({"BertModel": Heads(bert_pooler=True)}),),
    neutral=NEUTRAL,
    without_effect=WITHOUT_EFFECT,
    exported_constants=EXPORTED,
    ignored=(("embeddings.position_ids", "count_up", {}),),
    former_endings=FORMER_ENDINGS,
)
