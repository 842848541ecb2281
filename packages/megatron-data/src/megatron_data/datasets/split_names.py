"""Names of the three splits. Importing this module does not import numpy."""

from typing import Literal, TypeAlias, get_args

SplitName: TypeAlias = Literal["train", "valid", "test"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
