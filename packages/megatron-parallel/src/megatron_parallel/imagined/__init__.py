"""Runs one rank of a job of any size abstractly: without devices, other ranks or values."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
