"""Samples for training.

`gpt` cuts samples out of a token source along an order, `masks` finds document boundaries,
`blended` mixes datasets, `split` and `paths` read Megatron's `--split` and `--data-path`,
`build` puts them together, `mock` makes data up.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
