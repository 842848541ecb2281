"""Expert parallelism: tokens go to the ranks that hold their experts, and come back."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
