"""What of the forward pass is kept for the backward pass: computed again, cut, or moved away."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
