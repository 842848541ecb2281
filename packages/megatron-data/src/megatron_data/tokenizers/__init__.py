"""Tokenizers behind one small interface.

`protocol` states the interface and `kinds` names them all as Megatron does. `huggingface` wraps the
`tokenizers` library, `gpt2` and `wordpiece` make its definitions from older files, `sentence_piece`
and `tik_token` wrap the libraries of these names, `plain` holds the tokenizers that need no file;
`training` trains vocabularies, `loading` opens what any of them saved. `text_splitting` splits long
texts, `fast` encodes with gigatoken, and `conversations` gives the tokens of conversations and
which of them the loss counts.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
