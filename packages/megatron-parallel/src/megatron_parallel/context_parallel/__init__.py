"""Context parallelism: one sequence cut over several ranks, with attention across them.

    split = ContextSplit.zigzag(length, axis.size)         # the indices of each rank
    own = split.take(tokens, axis.index)                   # [b, s] to this rank's [b, s/cp]
    plan = plan_ring(SequenceMask(document_ids), split, axis.index)
    out = ring_attention(q, k, v, plan, axis)              # [s/cp, b, n, d]

Everything except attention works on single tokens, so a rank computes on its tokens as if they were
a sequence, with their positions in the whole sequence. There are four kinds of attention:

| function | communication |
|---|---|
| `ring_attention` | keys and values, from rank to rank while blocks are computed |
| `all_to_all_attention` | queries, keys, values, output: each rank has some heads of all tokens |
| `all_gather_attention` | keys and values: each rank has its own queries and all keys |
| `hierarchical_attention` | all-to-all of heads inside groups, a ring across groups |
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
