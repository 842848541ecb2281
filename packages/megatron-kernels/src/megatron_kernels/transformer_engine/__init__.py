"""Transformer Engine (NVIDIA): norms, and products of linear layers in FP8 and FP4.

`library` finds it, refuses versions whose interface is unknown and is the only module that imports
it. `norm` has the norms, `recipe` the formats, `products` the three products of a layer. They have
never run on a GPU by this project.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
