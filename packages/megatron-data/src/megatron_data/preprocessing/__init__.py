"""Converts text to indexed datasets, and merges, splits, verifies and traces datasets.

Users call `pipeline` (text), `conversations` and `image_pairs`. Each uses an encoder, which turns a
source chunk into documents: `encoding`, `conversation_encoding` or `image_encoding`. `protocol`
defines the interface of an encoder and `batches` is shared by all three.

`engine` runs any encoder: `pool` maps chunks over processes in order, `parts` stores finished
chunks so that a run can be resumed, `assembly` copies all parts into datasets, and `manifest`
records how a dataset was made. `origins` maps documents to sources, which `tracing` looks up.
`joining` merges and splits datasets and `verification` checks them. `benchmarking` measures speed.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
