"""Measurements of a run: log lines, MFU, metrics file, TensorBoard and loss plot."""
