"""BERT: post-LN, learned positions and token types, with both heads of pretraining."""

from families.case import FamilyCase
from families.encoder_draws import OTHERS, REFUSED, SETTINGS, encoder

CASE = FamilyCase(
    family="bert",
    config_class="BertConfig",
    model_class="BertForPreTraining",
    mathematics="bert",
    settings=SETTINGS,
    draws=encoder(("gelu", "gelu_new", "relu", "silu")),
    refused=REFUSED,
    others=OTHERS,
    comparison="families.encoders:ENCODER",
)
