"""RoBERTa: BERT without pairs of sentences, with other positions (Liu et al., 2019).

The position of the first token is `pad_token_id` + 1. The classes without a head of masked language
modelling have no pooler of pretraining: that of a classification is its own.
"""

from typing import Any

from megatron_models.errors import ConfigError
from megatron_models.families.family import Family
from megatron_models.families.settings import Custom, HFConfig, Mapped, unsupported_field
from megatron_models.models.bert.config import BertConfig
from megatron_models.models.bert.families.encoder import (
    EXPORTED,
    FORMER_ENDINGS,
    GELU,
    NEUTRAL,
    TRUNK_SETTINGS,
    VOCAB,
    WITHOUT_EFFECT,
    same,
    trunk_rows,
)
from megatron_models.models.bert.families.heads import Heads, heads


def _read_offset(title: str, hf_config: HFConfig) -> dict[str, Any]:
    padding = hf_config.get("pad_token_id", 1)
    if type(padding) is not int or padding < 0:
        raise ConfigError(f"{title} models with pad_token_id = {padding!r} are not supported")
    return {"position_offset": padding + 1}


def _write_offset(config: BertConfig) -> dict[str, Any]:
    if not config.position_offset:
        raise unsupported_field("position_offset", "at least 1", config.position_offset)
    return {"pad_token_id": config.position_offset - 1}


FAMILY = Family(
    name="roberta",
    kind="bert",
    title="RoBERTa",
    architectures=(
        "RobertaForMaskedLM",
        "RobertaForSequenceClassification",
    ),
    model_type="roberta",
    rows=(
        *trunk_rows("roberta."),
        ("lm_head.bias", ("lm_head.bias",), (VOCAB,), {"if": "$predicts_tokens"}),
        *same("lm_head.dense", "lm_head.dense", "predicts_tokens"),
        *same("lm_head.norm", "lm_head.layer_norm", "predicts_tokens"),
        *same("sequence_head.pooler", "classifier.dense", "has_task_output"),
        *same("sequence_head.out", "classifier.out_proj", "has_task_output"),
    ),
    settings={
        **TRUNK_SETTINGS,
        "vocab_size": Mapped("vocab_size", absent=50265),
        "activation": GELU,  # that of the head of masked language modelling is always exact
    },
    custom=(
        heads(
            {
                "RobertaForMaskedLM": Heads(masked_lm_head=True),
                "RobertaForSequenceClassification": Heads(task_head="classification"),
            }
        ),
        Custom(("position_offset",), ("pad_token_id",), _read_offset, _write_offset),
    ),
    neutral=NEUTRAL,
    without_effect=WITHOUT_EFFECT,
    exported_constants=EXPORTED,
    ignored=(
        (
            "lm_head.decoder.weight",
            "same_as",
            {"other": "roberta.embeddings.word_embeddings.weight", "rows": "$vocab_size"},
        ),
        ("lm_head.decoder.bias", "same_as", {"other": "lm_head.bias", "rows": "$vocab_size"}),
        ("roberta.embeddings.position_ids", "count_up", {}),
        *((f"roberta.pooler.dense.{part}", "not_read", {}) for part in ("weight", "bias")),
    ),
    prefix="roberta.",
    former_endings=FORMER_ENDINGS,
)
