"""BERT: post-LN layers, learned positions, token types, and a pooler (Devlin et al., 2019).

The class in `architectures` determines the heads: masked language modelling, the binary head for
pairs of sentences, both, or the head of a task. A head of pretraining that the class does not read
is left out of the model, as `transformers` does.
"""

from megatron_models.families.family import Family
from megatron_models.families.settings import Mapped
from megatron_models.models.bert.families.encoder import (
    EXPORTED,
    FORMER_ENDINGS,
    NEUTRAL,
    TRUNK_SETTINGS,
    VOCAB,
    WITHOUT_EFFECT,
    same,
    trunk_rows,
)
from megatron_models.models.bert.families.heads import Heads, heads

FAMILY = Family(
    name="bert",
    kind="bert",
    title="BERT",
    architectures=(
        "BertForPreTraining",
        "BertForMaskedLM",
        "BertForNextSentencePrediction",
        "BertForSequenceClassification",
        "BertForMultipleChoice",
    ),
    model_type="bert",
    rows=(
        *trunk_rows("bert."),
        ("lm_head.bias", ("cls.predictions.bias",), (VOCAB,), {"if": "$predicts_tokens"}),
        *same("lm_head.dense", "cls.predictions.transform.dense", "predicts_tokens"),
        *same("lm_head.norm", "cls.predictions.transform.LayerNorm", "predicts_tokens"),
        *same("sequence_head.pooler", "bert.pooler.dense", "has_sequence_pooler"),
        *same("sequence_head.out", "cls.seq_relationship", "has_binary_head"),
        *same("sequence_head.out", "classifier", "has_task_output"),
    ),
    settings={**TRUNK_SETTINGS, "vocab_size": Mapped("vocab_size", absent=30522)},
    custom=(
        heads(
            {
                "BertForPreTraining": Heads(masked_lm_head=True, bert_binary_head=True),
                "BertForMaskedLM": Heads(masked_lm_head=True),
                "BertForNextSentencePrediction": Heads(bert_binary_head=True),
                "BertForSequenceClassification": Heads(task_head="classification"),
                "BertForMultipleChoice": Heads(task_head="multiple_choice"),
            }
        ),
    ),
    neutral=NEUTRAL,
    without_effect=WITHOUT_EFFECT,
    exported_constants=EXPORTED,
    ignored=(
        (
            "cls.predictions.decoder.weight",
            "same_as",
            {"other": "bert.embeddings.word_embeddings.weight", "rows": "$vocab_size"},
        ),
        (
            "cls.predictions.decoder.bias",
            "same_as",
            {"other": "cls.predictions.bias", "rows": "$vocab_size"},
        ),
        ("bert.embeddings.position_ids", "count_up", {}),
        *(
            (f"{name}.{part}", "not_read", {})
            for name in ("bert.pooler.dense", "cls.seq_relationship")
            for part in ("weight", "bias")
        ),
    ),
    prefix="bert.",
    former_endings=FORMER_ENDINGS,
)
