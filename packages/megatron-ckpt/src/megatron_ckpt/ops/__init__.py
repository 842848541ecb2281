"""Rows of reversible operations between our tensors and those of other projects."""
