"""Context parallelism: one sequence cut over several ranks, attention across them.

    split = ContextSplit.zigzag(length, axis.size)         # which places each rank holds
    own = split.take(tokens, axis.index)                   # [b, s] to this rank's [b, s/cp]
    plan = plan_ring(SequenceMask(document_ids), split, axis.index)
    out = ring_attention(q, k, v, plan, axis)              # [s/cp, b, n, d]

Everything but attention works on single tokens, so a rank computes on its places as if they were a
sequence, with the positions they have in the whole one. Attention goes one of four ways:

| function | what travels |
|---|---|
| `ring_attention` | keys and values, from rank to rank while blocks are computed |
| `all_to_all_attention` | queries, keys, values, output: each rank has all places of some heads |
| `all_gather_attention` | keys and values: each rank has its own queries and all keys |
| `hierarchical_attention` | heads are scattered inside, a ring goes round outside |
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
