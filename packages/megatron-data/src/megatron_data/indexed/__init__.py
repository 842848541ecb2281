"""Indexed datasets: the `.bin`/`.idx` files that Megatron reads and writes, byte for byte.

`format` defines the layout, `reader` reads a dataset, `builder` writes one atomically.
`dataset_files` opens the two files, `images` packs images into sequences, and `inspection` computes
statistics.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
