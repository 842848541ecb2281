"""RoBERTa: BERT with positions that follow the token for padding, and other names of the head."""

from families.case import FamilyCase
from families.draws import merged
from families.encoder_draws import OTHERS, REFUSED, SETTINGS, encoder
from hypothesis import strategies as st

CASE = FamilyCase(
    family="roberta",
    config_class="RobertaConfig",
    model_class="RobertaForMaskedLM",
    mathematics="bert",
    settings=SETTINGS,
    draws=merged(
        encoder(("gelu",)), st.fixed_dictionaries({"pad_token_id": st.sampled_from((0, 1, 3))})
    ),
    refused=REFUSED,
    others=OTHERS | {"pad_token_id": (0, 5)},
    comparison="families.encoders:ENCODER",
)
