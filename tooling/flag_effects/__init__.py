"""What each flag is added to, and what it changes, for `test_flags_have_effect.py`."""

from flag_effects.model import MODEL
from flag_effects.refusals import ALIAS_REFUSALS, REFUSALS
from flag_effects.run import RUN

EFFECTS = {**MODEL, **RUN}

__all__ = ["ALIAS_REFUSALS", "EFFECTS", "REFUSALS"]
