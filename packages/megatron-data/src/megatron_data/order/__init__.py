"""Which tokens make up which sample.

`spans` states what a dataset asks of an order, `compat` builds Megatron's document, sample and
shuffle indices, `blend` its mixing of several datasets, `cache` keeps built indices on disk.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
