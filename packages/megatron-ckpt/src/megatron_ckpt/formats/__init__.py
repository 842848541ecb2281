"""Foreign formats that a model can be imported from."""
