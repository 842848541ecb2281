"""What a run measures and records: log lines, MFU, metrics file, TensorBoard, loss plot."""
