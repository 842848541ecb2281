"""Runs test functions on several ranks: a pool of processes joined by torch.distributed.

    with WorkerPool(max_ranks=2) as pool:
        results = pool.run(function, argument, ranks=2, timeout=30)

calls ``function(rank, argument)`` in two processes and returns both results. The processes stay
alive between calls, so a call takes milliseconds. With pytest, use the fixture ``worker_pool``.
Functions that are not in a package, such as tests, need the extra ``megatron-parallel[testing]``.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
