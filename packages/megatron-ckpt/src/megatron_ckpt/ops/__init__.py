"""Reversible operations that convert between our tensors and those of other projects.

"Ours" are the tensors and names of a checkpoint of this project; "theirs" are those of the other
format, such as Hugging Face's.
"""
