"""Tokenizers behind one small interface.

`protocol` states the interface, `huggingface` wraps the `tokenizers` library, `plain` holds the
tokenizers that need no file, `training` trains byte-level BPE, `loading` opens what any of them
saved.
"""
