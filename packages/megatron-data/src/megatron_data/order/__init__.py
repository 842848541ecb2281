"""Sample orders: which tokens form sample i, and which dataset of a blend it comes from.

`protocol` defines the interfaces. Sample orders are `stateless` (the default), `packing`, `compat`
(Megatron's document, sample and shuffle indices) and `rows` (Megatron's order of conversations).
Blend orders are `schedule` (computed by `apportionment`) and `blend` (Megatron's). `sentences` has
Megatron's sample maps of BERT, T5 and the inverse cloze task. `permutation` computes permutations
and `mersenne` the random numbers of C++; `cache` stores built indices on disk.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
