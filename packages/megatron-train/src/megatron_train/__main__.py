"""``python -m megatron_train``: the command ``megatron-train``, for ``torchrun -m``."""

import logging
import os
import sys

from megatron_train.cli import main
from megatron_train.cli.main import exit_now

if __name__ == "__main__":
    status = main()
    if "RANK" in os.environ:  # threads of torch's process groups may abort a regular exit
        logging.shutdown()
        exit_now(status)
    sys.exit(status)
