"""Optimizers, schedules and gradient clipping for sharded, mixed-precision training."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
