"""Multi-token prediction: layers after the last one that predict further tokens."""
