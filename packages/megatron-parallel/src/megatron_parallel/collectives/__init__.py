"""Collectives over one axis of a mesh, their traffic and their failures."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
