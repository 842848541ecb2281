"""Tensor-parallel layers, vocabulary-parallel cross entropy, and the products of layers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
