"""How much wider a parameter is than in the model that a learning rate was chosen for.

Importing this module does not import torch.
"""

from typing import NamedTuple


class WidthRatio(NamedTuple):
    """Sizes of a parameter over those in the model that the learning rate was chosen for.

    A model supplies the ratios of its parameters, and each update rule derives its learning rate
    from them (`megatron_optim.UpdateRule.for_width`). Biases and gains have as many outputs as the
    layer is wide, and 1 input. So have embeddings, whose rows are looked up.

    Attributes:
        inputs: Ratio of the numbers of inputs.
        outputs: Ratio of the numbers of outputs.
    """

    inputs: float = 1.0
    outputs: float = 1.0


SAME_WIDTH = WidthRatio()
"""The ratio of a parameter that is as wide as in the other model."""
