"""The `.bin`/`.idx` pair that Megatron reads and writes, byte for byte.

`format` knows the layout, `reader` maps a pair into memory, `builder` writes one atomically.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
