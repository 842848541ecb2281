"""What text is read from: a corpus in pieces of bounded size, one kind of input a module.

`protocol` says what a source is; `json_lines`, `text_files`, `parquet` and `parallel_lines` are
those there are; `opening` decides which of them a path is. `storage` finds and opens files, here
or by fsspec, and `failures` says in one line what it was told; `streams` unpacks them.
`conversations` reads a line that holds some.

Datasets in object storage are read through `remote`, a file in parts, and `block_cache`, which
keeps parts of them in a `block_folder`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
