"""Numbers of dropout sites; `megatron_models.components.dropout` has the table.

They are part of every training curve and do not change. Importing this module does not import
torch.
"""

from typing import Final

EMBEDDING_LAYER: Final = -1
EMBEDDING: Final = 0
ATTENTION_PROBABILITIES: Final = 1
ATTENTION_OUTPUT: Final = 2
MLP_OUTPUT: Final = 3
CROSS_ATTENTION_PROBABILITIES: Final = 4
CROSS_ATTENTION_OUTPUT: Final = 5
DECODER_EMBEDDING: Final = 6
ROUTER_INPUT: Final = 7
SEQUENCE_HEAD: Final = 8
