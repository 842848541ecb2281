"""The console script `megatron-data`.

`main` is the entry point. `options`, `work`, `bounds` and `tables` are shared; every other module
defines one command: its options (`add_parser`) and its work (`run`).
"""

from megatron_data.cli.main import main

__all__ = ["main"]
