"""``python -m megatron_train``: the command ``megatron-train``, for ``torchrun -m``."""

import sys

from megatron_train.cli import main

if __name__ == "__main__":
    sys.exit(main())
