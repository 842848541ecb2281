"""Wrong configurations of models, the words of their errors, and a change that mends each.

Without torch, so that a process that cannot import it reads the cases.
"""

from collections.abc import Mapping

from refusals.cases.attention import ATTENTION, LATENTS, TYPES, VARIANTS
from refusals.cases.case import Case
from refusals.cases.encoders import ENCODER_DECODERS, ENCODERS, HEADS
from refusals.cases.experts import MOE, ROUTER
from refusals.cases.layers import BLOCK, LAYERS, RECURRENT
from refusals.cases.layouts import LAYOUTS
from refusals.cases.positions import ROTARY

CASES: Mapping[str, Case] = {
    f"{group}: {name}": case
    for group, cases in {
        "types": TYPES,
        "attention": ATTENTION,
        "rotary": ROTARY,
        "variants": VARIANTS,
        "latents": LATENTS,
        "block": BLOCK,
        "router": ROUTER,
        "moe": MOE,
        "layers": LAYERS,
        "layout": LAYOUTS,
        "encoder-decoder": ENCODER_DECODERS,
        "recurrent": RECURRENT,
        "heads": HEADS,
        "encoders": ENCODERS,
    }.items()
    for name, case in cases.items()
}
