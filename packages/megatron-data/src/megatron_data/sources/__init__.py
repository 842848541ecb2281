"""Reads text corpora in source chunks of bounded size.

`protocol` defines a source. `json_lines`, `text_files`, `parquet` and `parallel_lines` are the
kinds of sources, and `opening` chooses the kind of a path. `storage` finds and opens local files
and files at URLs (with fsspec); `urls` decides which URLs are allowed, and `failures` converts
errors of storage to one line. `streams` decompresses files. `conversations` parses lines that hold
conversations.

Datasets in object storage are read by `remote` (ranges of a file) and `block_cache`, which caches
ranges in a `block_folder`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
