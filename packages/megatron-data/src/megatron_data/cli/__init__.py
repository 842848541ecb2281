"""The console script `megatron-data`.

`main` is the entry point; every other module holds one command: its options and what it does.
"""

from megatron_data.cli.main import main

__all__ = ["main"]
