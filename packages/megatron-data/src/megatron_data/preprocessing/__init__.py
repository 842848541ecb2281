"""From text to an indexed dataset, and from datasets to others.

`protocol` says what makes the documents of datasets of a chunk of a source: `encoding` of texts,
`conversation_encoding` of conversations, `image_encoding` of texts and images; `batches` is what
they share. `engine` does the work for any of them: `parts` keeps finished chunks, `pool` maps
chunks over processes in order, `assembly` copies all parts into datasets, `manifest` records what
was done. `pipeline`, `conversations` and `image_pairs` are what a user calls. `origins` says where
documents came from, which `tracing` looks up; `joining` merges and splits datasets.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
