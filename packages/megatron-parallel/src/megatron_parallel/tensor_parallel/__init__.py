"""Layers cut over the tensor-parallel axis, and the loss over a cut vocabulary."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
