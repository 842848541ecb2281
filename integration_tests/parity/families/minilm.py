"""MiniLM: BERT with a pooler and without a head."""

from families.case import FamilyCase
from families.encoder_draws import OTHERS, REFUSED, SETTINGS, encoder

CASE = FamilyCase(
    family="minilm",
    config_class="BertConfig",
    model_class="BertModel",
    mathematics="bert",
    settings=SETTINGS,
    draws=encoder(("gelu", "gelu_new", "relu", "silu")),
    refused=REFUSED,
    others=OTHERS,
    trained={"task_head": "classification", "bert_pooler": False},
    comparison="families.encoders:ENCODER",
)
