"""Layers with another mixer than attention, chosen for a whole model by one name."""
