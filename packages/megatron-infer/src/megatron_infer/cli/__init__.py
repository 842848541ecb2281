"""The command ``megatron-infer``. Importing it does not import torch."""

from megatron_infer.cli.main import main as main
