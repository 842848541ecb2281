"""Checks of maximal update parametrization: sizes of activations, and best learning rates."""
